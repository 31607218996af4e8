"""What an engine's node is asked before it starts one: the same Personae, and the same model."""

import hashlib
from pathlib import Path

import personae

_WHOLE = 8 * 2**20  # bytes of a file that are all read
_SAMPLES = 2048  # of a larger one
_SAMPLE = 4096  # bytes
_NAMES = ("config.json", "tokenizer.json", "*.safetensors")  # in a folder


def version() -> str:
    """Of the code that runs here."""
    return personae.__version__


def weights_digest(model: Path) -> str:
    """Of a model: the names and sizes of its files and their content. Large files are sampled, evenly from
    their beginning to their end: enough to tell one training from another, and quick. Raises OSError."""
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
    """Why no engine that is to serve this model can be started here; None if one can."""
    if frontend_version != version():
        return f"it has Personae {version()}, the frontend has {frontend_version}; install the same."
    path = Path(model)
    if not path.exists():
        return f"there is no model at {model}; every node needs it under the same path."
    try:
        here = weights_digest(path)
    except OSError as error:
        return f"the model at {model} can't be read: {error.strerror or error}."
    if here != weights:
        return f"the model at {model} is not the frontend's: its weights or its tokenizer are others."
    return None
