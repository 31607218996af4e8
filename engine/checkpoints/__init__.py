"""Models as they lie on disk: a Hugging Face folder or a GGUF file, behind one face."""

from pathlib import Path

from personae.engine.checkpoints.base import Checkpoint
from personae.engine.checkpoints.huggingface import Folder


def open_checkpoint(path: Path) -> Checkpoint:
    """The model at `path`: a GGUF file, a folder that holds one and no config.json, or a Hugging Face folder.

    Raises ModelLoadError with what is wrong.
    """
    if path.is_file():
        return _gguf(path)
    if not (path / "config.json").is_file() and (file := _gguf_in(path)) is not None:
        return _gguf(file)
    return Folder(path)


def _gguf_in(folder: Path) -> Path | None:
    if next(folder.glob("*.gguf"), None) is None:
        return None
    from personae.engine.checkpoints.gguf.checkpoint import gguf_in

    return gguf_in(folder)


def _gguf(path: Path) -> Checkpoint:
    from personae.engine.checkpoints.gguf.checkpoint import (
        GgufFile,
    )  # the package `gguf` only for a GGUF file

    return GgufFile(path)
