"""Models as they lie on disk: a Hugging Face folder or a GGUF file, behind one face."""

from pathlib import Path

from personae.engine.checkpoints.base import Checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """The model at `path`: a GGUF file, a folder that holds one and no config.json, else a Hugging Face folder.

    Raises ModelLoadError with what is wrong.
    """
    from personae.engine.checkpoints.huggingface import Folder

    return Folder(path)
