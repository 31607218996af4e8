"""Numerics classes: two engines of one class compute the same tokens.

The digest of the weights is made of samples: all of a small file; the head and evenly spaced blocks of a
large one. It distinguishes weights that differ by training or conversion, in milliseconds. It may miss a
single changed byte.
"""

import hashlib
from pathlib import Path

import msgspec

_BLOCK = 4096  # bytes
_BLOCKS = 256  # per file, evenly spaced


class NumericsClass(msgspec.Struct, frozen=True):
    """Everything that decides an engine's numbers: the weights' digest, the formats of weights and KV cache,
    the instructions, and how ranks share the model."""

    weights: str = ""
    dtype: str = ""
    quantization: str | None = None
    kv_dtype: str = ""
    instructions: str = ""

    def differences(self, other: "NumericsClass") -> list[str]:
        """The names of the fields that differ."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]


def weight_files(model: Path) -> list[Path]:
    """The files of a model folder or file that have its weights, and the folder's `config.json`. Raises
    ModelLoadError if a file has parts and one is missing."""
    if model.is_dir():
        files = sorted(path for pattern in ("*.safetensors", "*.gguf") for path in model.glob(pattern))
        config = model / "config.json"
        return [config, *files] if config.is_file() else files
    if model.suffix != ".gguf":
        return [model]
    from personae.engine.checkpoints.gguf.files import parts  # the package `gguf` only for a GGUF file

    return parts(model)


def weights_digest(model: Path) -> str:
    """The digest of a model folder or file."""
    digest = hashlib.sha256()
    for path in weight_files(model):
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        step = max(size // _BLOCKS, _BLOCK)
        with path.open("rb") as file:
            for at in range(0, size, step):
                file.seek(at)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
