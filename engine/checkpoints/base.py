"""The interface of a model on disk."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from personae.engine.config import ModelConfig
from personae.engine.generation_config import GenerationDefaults
from personae.engine.quantization import base, method_of
from personae.engine.quantization.base import LinearMethod, Scheme
from personae.engine.quantization.unquantized import Unquantized
from personae.engine.tokenizer_files import TokenizerFiles
from personae.errors import ModelLoadError, as_json
from personae.lora.shards import Shard

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
LOOKED_UP = (base.EMBEDDING, base.PER_LAYER)  # the modules that are tables
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class StoredTensor(ABC):
    """A tensor as a file's header describes it.

    `name` is its name in the file. `file` identifies the file. `dtype` is the file's own name for it;
    `served`: whether it can be read. `bytes`: its size in the file.
    """

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    served: bool
    bytes: int

    @abstractmethod
    def read(self) -> Tensor:
        """The tensor in a floating dtype."""

    def copy_to(self, place: Tensor) -> None:
        """Copies the tensor to `place`."""
        place.copy_(self.read())

    def part(self, shard: Shard) -> Tensor:
        """A rank's part of the tensor. Files that can be read in parts read only that."""
        return shard.of(self.read())

    @property
    def kept(self) -> str | None:
        """The `kind` of quantized weight that has exactly its values in as few bits; None if none has."""
        return None

    @property
    def within(self) -> str | None:
        """The `kind` of quantized weight that has its values in more bits, and those of others, too; None if
        none has."""
        return None

    def entry(self, index: int) -> Tensor:
        """tensor[index]. Files that can be read in parts read only that."""
        return self.read()[index]

    def blocks(self, kind: str) -> Tensor:
        """See `kernels.quantized.Stored`."""
        raise TypeError(f"{self.name} has no blocks of {kind}")

    def entry_blocks(self, index: int, kind: str) -> Tensor:
        """The `blocks` of tensor[index], or of its transpose if the file has that."""
        raise TypeError(f"{self.name} has no blocks of {kind}")

    def scaled(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """See `kernels.quantized.Stored`."""
        return None


@dataclass(frozen=True, slots=True)
class Numerics:
    """The dtype in which a model is computed, and the formats of its weights.

    `quantization`: the name of the format that most weights have, None if they are in `dtype`.
    """

    dtype: torch.dtype
    scheme: Scheme
    quantization: str | None = None


class Checkpoint(Protocol):
    """A model on disk. Each method reads what it needs. All raise ModelLoadError."""

    @property
    def name(self) -> str:
        """The model's default name."""

    def config(self) -> ModelConfig:
        """The model's shape."""

    def generation_defaults(self, vocab_size: int) -> GenerationDefaults:
        """The sampling defaults that the model's makers recommend."""

    def tokenizer_files(self) -> TokenizerFiles:
        """The tokenizer and its settings."""

    def tensors(self, config: ModelConfig) -> Mapping[str, StoredTensor]:
        """Its tensors by the names that `Decoder.tensors` uses. An unknown tensor keeps its own name."""

    def numerics(
        self,
        config: ModelConfig,
        stored: Mapping[str, StoredTensor],
        device: torch.device,
        dtype: str,
        quantize: str | None,
    ) -> Numerics:
        """The numerics for the requested `dtype` ("auto" is the model's own) and `quantize`."""

    def created(self) -> int:
        """When the model was made, in seconds since 1970."""


def kept_as_stored(
    stored: Mapping[str, StoredTensor], kinds: Collection[str], *, looks_up: bool = False
) -> Scheme:
    """Modules whose tensors all have the same one of these kinds keep it, or else one that has the values of
    all; the others have the model's dtype. Without an output matrix, the embedding is that. `looks_up`:
    whether the device can look rows up in these kinds, so that embeddings keep their own, too."""
    found: dict[str, tuple[str | None, str | None]] = {}

    def kinds_of(module: str) -> tuple[str | None, str | None]:
        weight = f"{module}.weight"
        tensor = stored.get(EMBEDDING if weight == OUTPUT and weight not in stored else weight)
        return (None, None) if tensor is None else (tensor.kept, tensor.within)

    def scheme(names: Sequence[str]) -> type[LinearMethod]:
        for name in names:
            if name not in found:
                plain = name in LOOKED_UP and not looks_up
                found[name] = (None, None) if plain else kinds_of(name)
        for of_all in zip(*(found[name] for name in names), strict=True):
            kind = of_all[0]
            if kind is not None and kind in kinds and len({*of_all}) == 1:
                return method_of(kind)
        return Unquantized

    return scheme


def dtype_of(asked: str, name: str) -> torch.dtype:
    """The dtype of that name. `asked`: the source of the name, for the error."""
    if name not in DTYPES:
        raise ModelLoadError(f"{asked}: {as_json(name)} is not supported; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]
