"""The interface of a model on disk."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from personae.engine.config import ModelConfig
from personae.engine.generation_config import GenerationDefaults
from personae.engine.quantization.base import Scheme
from personae.engine.tokenizer_files import TokenizerFiles
from personae.errors import ModelLoadError

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
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

    @abstractmethod
    def blocks(self) -> Tensor:
        """See `kernels.quantized.Stored`."""

    def entry(self, index: int) -> Tensor:
        """tensor[index]. Files that can be read in parts read only that."""
        return self.read()[index]

    def scaled(self) -> tuple[Tensor, Tensor] | None:
        """See `kernels.quantized.Stored`: only of tensors that are in 8 bits."""
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


def dtype_of(asked: str, name: str) -> torch.dtype:
    """The dtype of that name. `asked`: the source of the name, for the error."""
    if name not in DTYPES:
        raise ModelLoadError(f"{asked}: {name!r} is not supported; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]
