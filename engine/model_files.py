"""The files of a model that is loaded, of which parts are read again while it serves."""

from collections.abc import Mapping
from pathlib import Path

from personae.engine.numerics import weight_files
from personae.engine.packed_weights import file_facts
from personae.engine.quantization.base import StoredParts
from personae.errors import ModelLoadError


class ModelFiles:
    """`stored`: the files' tensors, by the names of `Decoder.tensors`."""

    def __init__(self, path: Path, stored: Mapping[str, StoredParts]) -> None:
        self.stored = stored
        self._path, self._facts = path, file_facts(weight_files(path))

    def check(self) -> None:
        """Raises ModelLoadError if the files are not those that were loaded."""
        try:
            same = file_facts(weight_files(self._path)) == self._facts
        except OSError as error:
            raise ModelLoadError(f"{self._path}: {error.strerror}") from error
        if not same:
            raise ModelLoadError(f"{self._path} has changed since the model was loaded")
