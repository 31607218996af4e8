"""Models on disk, with one interface: a Hugging Face folder or a GGUF file."""

from pathlib import Path
from typing import TYPE_CHECKING

from personae.engine.tokenizer_files import TokenizerFiles, read_tokenizer_files

if TYPE_CHECKING:
    from personae.engine.checkpoints.base import Checkpoint


def open_checkpoint(path: Path) -> "Checkpoint":
    """The model at `path`: a GGUF file, a folder with one and without config.json, or a Hugging Face folder.

    Raises ModelLoadError, which says what is wrong.
    """
    if (file := _gguf_at(path)) is not None:
        from personae.engine.checkpoints.gguf.checkpoint import GgufFile

        return GgufFile(file)
    from personae.engine.checkpoints.huggingface import Folder

    return Folder(path)


def tokenizer_files(path: Path) -> TokenizerFiles:
    """The tokenizer of the model at `path`, read without torch. Raises ModelLoadError."""
    if (file := _gguf_at(path)) is None:
        return read_tokenizer_files(path)
    from personae.engine.checkpoints.gguf.files import metadata_of, read_headers
    from personae.engine.checkpoints.gguf.tokenizer import read_tokenizer

    return read_tokenizer(metadata_of(read_headers(file)))


def _gguf_at(path: Path) -> Path | None:
    """The model's GGUF file, if that is what it is."""
    if path.is_file():
        return path
    if (path / "config.json").is_file() or next(path.glob("*.gguf"), None) is None:
        return None
    from personae.engine.checkpoints.gguf.files import gguf_in  # the package `gguf` only for a GGUF file

    return gguf_in(path)
