"""What the numbers of an engine depend on: two engines of one class compute the same tokens.

The digest of the weights is of samples: all of a small file, of a large one its head and blocks all over it.
It tells apart weights that differ by training or conversion, in milliseconds, and is no proof against someone
who changes single bytes.
"""

import hashlib
from pathlib import Path

import msgspec

_BLOCK = 4096  # bytes
_BLOCKS = 256  # of a file, evenly spaced


class NumericsClass(msgspec.Struct, frozen=True):
    """The weights' digest, how they and the KV cache are kept, what computes them, in how many ranks."""

    weights: str = ""
    dtype: str = ""
    quantization: str | None = None
    kv_dtype: str = ""
    instructions: str = ""
    ranks: int = 1

    def differences(self, other: "NumericsClass") -> list[str]:
        """The names of the fields that differ."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]


def weights_digest(model: Path) -> str:
    """Of a model folder or file."""
    digest = hashlib.sha256()
    if model.is_dir():
        files = sorted(path for pattern in ("*.safetensors", "*.gguf") for path in model.glob(pattern))
        if (config := model / "config.json").is_file():
            files.insert(0, config)
    else:
        files = [model]
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        step = max(size // _BLOCKS, _BLOCK)
        with path.open("rb") as file:
            for at in range(0, size, step):
                file.seek(at)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
