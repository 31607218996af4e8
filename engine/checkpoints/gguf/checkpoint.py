"""A model in GGUF: one file, or several parts."""

from collections import Counter
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path

import torch

from personae.engine.checkpoints.base import Numerics, StoredTensor, dtype_of, kept_as_stored
from personae.engine.checkpoints.gguf.architectures import architecture_of
from personae.engine.checkpoints.gguf.config import read_gguf_config
from personae.engine.checkpoints.gguf.files import PART, metadata_of, read_headers
from personae.engine.checkpoints.gguf.header import Header
from personae.engine.checkpoints.gguf.metadata import Metadata
from personae.engine.checkpoints.gguf.tensors import factors, named
from personae.engine.checkpoints.gguf.tokenizer import end_ids, read_tokenizer
from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.generation_config import GenerationDefaults
from personae.engine.quantization import scheme_of
from personae.engine.quantization.gguf import METHODS
from personae.engine.tokenizer_files import TokenizerFiles
from personae.errors import ModelLoadError
from personae.kernels.decoder import lookup
from personae.kernels.registry import optional

MEANINGLESS_SAMPLING = frozenset(  # without XTC and Mirostat, and with one order of samplers
    ["sequence", "xtc_threshold", "mirostat_tau", "mirostat_eta"]
)
PLAIN = {"F32": "float32", "F16": "float16"}  # all other types run in bfloat16


class GgufFile:
    """See `Checkpoint`. `path`: the file, or the first of its parts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """See `Checkpoint`: the file's name without its part number."""
        match = PART.fullmatch(self.path.name)
        return match[1] if match else self.path.name.removesuffix(".gguf")

    @cached_property
    def _headers(self) -> list[Header]:
        return read_headers(self.path)

    @cached_property
    def _metadata(self) -> Metadata:
        return metadata_of(self._headers)

    def config(self) -> ModelConfig:
        """See `Checkpoint`."""
        tensors = {name: info for header in self._headers for name, info in header.tensors.items()}
        config = read_gguf_config(self._metadata, tensors, partial(factors, self._headers[0]))
        if len(self._metadata.texts("tokenizer.ggml.tokens")) > config.vocab_size:
            raise self._metadata.error(
                "tokenizer.ggml.tokens",
                f"has more tokens than token_embd.weight has rows, {config.vocab_size}",
            )
        return config

    def generation_defaults(self, vocab_size: int) -> GenerationDefaults:
        """See `Checkpoint`."""
        metadata = self._metadata
        prefix = "general.sampling."
        keys = ("temp", "top_p", "top_k", "min_p", "penalty_repeat", "penalty_last_n")
        values = {key: metadata.raw(f"{prefix}{key}") for key in keys}
        fields = Fields(values, f"{metadata.where}: general.sampling")
        penalty = fields.optional_number("penalty_repeat")
        if penalty not in (None, 1.0) and values["penalty_last_n"] not in (None, -1):
            raise fields.error("penalty_last_n", "is not supported: a penalty is for all tokens")
        if metadata.raw(f"{prefix}xtc_probability") or metadata.raw(f"{prefix}mirostat"):
            raise ModelLoadError(f"{fields.where}: XTC and Mirostat are not supported")
        metadata.refuse_unread(prefix, MEANINGLESS_SAMPLING)
        return GenerationDefaults(
            eos=end_ids(self._metadata),
            temperature=fields.optional_number("temp", zero=True),
            top_p=fields.optional_number("top_p", high=1.0),
            top_k=fields.size("top_k", zero=True) if "top_k" in fields else None,
            min_p=fields.optional_number("min_p", zero=True, high=1.0),
            repetition_penalty=penalty,
        )

    def tokenizer_files(self) -> TokenizerFiles:
        """See `Checkpoint`."""
        return read_tokenizer(self._metadata)

    def created(self) -> int:
        """See `Checkpoint`."""
        return int(self.path.stat().st_mtime)

    def tensors(self, config: ModelConfig) -> dict[str, StoredTensor]:
        """See `Checkpoint`."""
        known = architecture_of(self._metadata)
        return named(self._headers, config, permuted=known.permuted, tiled=known.tiled)

    def numerics(
        self,
        config: ModelConfig,
        stored: Mapping[str, StoredTensor],
        device: torch.device,
        dtype: str,
        quantize: str | None,
    ) -> Numerics:
        """See `Checkpoint`. "auto": blocks that the device's backend can multiply keep their format, with
        activations in bfloat16. A file of F32 or of F16 has that type, everything else bfloat16."""
        if dtype != "auto" or quantize is not None:
            return Numerics(
                dtype_of("dtype", "bfloat16" if dtype == "auto" else dtype), scheme_of(quantize), quantize
            )
        types = {tensor.dtype for tensor in stored.values() if len(tensor.shape) == 2}
        plain = PLAIN.get(next(iter(types), "")) if len(types) == 1 else None
        keeps = optional("pack_linear", device, torch.bfloat16) is not None
        if plain is not None or not keeps:
            return Numerics(dtype_of("dtype", plain or "bfloat16"), scheme_of(None))
        kinds = Counter(tensor.dtype for tensor in stored.values() if tensor.kept is not None)
        name = kinds.most_common(1)[0][0] if kinds else None
        looks_up = lookup(device, torch.bfloat16) is not None
        scheme = kept_as_stored(stored, frozenset(METHODS), looks_up=looks_up)
        return Numerics(torch.bfloat16, scheme, name)
