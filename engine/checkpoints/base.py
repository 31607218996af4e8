"""What the engine wants to know of a model on disk."""

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

    `name` is that in the file, `file` tells tensors of one file from those of another, `dtype` is the file's
    own word; `served`: it can be read. `bytes`: its size in the file.
    """

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    served: bool
    bytes: int

    @abstractmethod
    def read(self) -> Tensor:
        """It, in a floating dtype."""

    def copy_to(self, place: Tensor) -> None:
        """Fills a tensor with it."""
        place.copy_(self.read())

    @abstractmethod
    def blocks(self) -> Tensor:
        """See `kernels.quantized.Stored`."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """In what the model is computed: its dtype, and the formats of its weights.

    `quantization`: the name of the format that most have, None for as the dtype says.
    """

    dtype: torch.dtype
    scheme: Scheme
    quantization: str | None = None


class Checkpoint(Protocol):
    """A model on disk. Each method reads what it needs; all raise ModelLoadError."""

    @property
    def name(self) -> str:
        """Its default name."""

    def config(self) -> ModelConfig:
        """Its shape."""

    def generation_defaults(self, vocab_size: int) -> GenerationDefaults:
        """What its makers recommend for sampling."""

    def tokenizer_files(self) -> TokenizerFiles:
        """How its text is tokenized."""

    def tensors(self, config: ModelConfig) -> Mapping[str, StoredTensor]:
        """Its tensors by the names that `Decoder.tensors` has for them; what it cannot name by its own."""

    def numerics(
        self,
        config: ModelConfig,
        stored: Mapping[str, StoredTensor],
        device: torch.device,
        dtype: str,
        quantize: str | None,
    ) -> Numerics:
        """What is run when `dtype` ("auto" is the model's own) and `quantize` are asked for."""

    def created(self) -> int:
        """When it was made, in seconds since 1970."""


def dtype_of(asked: str, name: str) -> torch.dtype:
    """The dtype of that name. `asked`: who asked for it, for the error."""
    if name not in DTYPES:
        raise ModelLoadError(f"{asked}: {name!r} is not served; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]
