"""Checks whether a node can start an engine: it needs the same Personae and the same model."""

import hashlib
from pathlib import Path

import personae

_WHOLE = 8 * 2**20  # bytes; a smaller file is read completely
_SAMPLES = 2048  # of a larger file
_SAMPLE = 4096  # bytes
_NAMES = ("config.json", "tokenizer.json", "*.safetensors")  # the files of a model folder


def version() -> str:
    """The version of the code that runs here."""
    return personae.__version__


def model_digest(model: Path) -> str:
    """The digest of a model: the names, sizes and content of its files. Large files are sampled evenly from
    their beginning to their end, which is quick and enough to distinguish two trainings. Raises OSError."""
    total = hashlib.sha256(b"personae weights 1\n")
    paths = [model] if model.is_file() else sorted({path for name in _NAMES for path in model.glob(name)})
    if not paths:
        raise FileNotFoundError(f"no model at {model}")
    for path in paths:
        total.update(_sampled(path, "" if path == model else path.name))
    return total.hexdigest()


def _sampled(path: Path, name: str) -> bytes:
    size = path.stat().st_size
    found = hashlib.sha256(f"{name} {size}\n".encode())
    with path.open("rb", buffering=0) as file:
        if size <= _WHOLE:
            found.update(file.readall())
            return found.digest()
        for number in range(_SAMPLES):
            file.seek(number * (size - _SAMPLE) // (_SAMPLES - 1))
            found.update(file.read(_SAMPLE))
    return found.digest()


def refusal(frontend_version: str, model: str, weights: str) -> str | None:
    """Return why an engine for this model can't be started here; None if it can."""
    if frontend_version != version():
        return f"it has Personae {version()}, the frontend has {frontend_version}; install the same."
    path = Path(model)
    if not path.exists():
        return f"there is no model at {model}; every node needs it under the same path."
    try:
        own = model_digest(path)
    except OSError as error:
        return f"the model at {model} can't be read: {error.strerror or error}."
    if own != weights:
        return f"the model at {model} is not the frontend's: it has other weights or another tokenizer."
    return None
