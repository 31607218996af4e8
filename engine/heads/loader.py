"""Recognises a head by its `config.json`, and loads it for the model that it guesses for."""

from pathlib import Path

from personae.engine.fields import read_fields
from personae.engine.heads.eagle3_config import architecture, is_eagle3
from personae.engine.heads.eagle3_loader import load_eagle3
from personae.engine.heads.head import Head
from personae.engine.heads.mtp_loader import is_mtp, load_mtp
from personae.engine.models.decoder import Decoder
from personae.errors import ModelLoadError

_CONFIG = "config.json"
_OTHERS = ("eagle", "medusa", "mtp", "nextn", "mlpspeculator", "dflash", "hydra")


def is_head(path: Path) -> bool:
    """Whether the folder has a trained head: alone, or as a part of a model. Raises ModelLoadError if its
    config.json cannot be read."""
    if not (path / _CONFIG).is_file():
        return False
    fields = read_fields(path / _CONFIG)
    if is_eagle3(fields) or is_mtp(fields):
        return True
    return any(kind in architecture(fields).lower() for kind in _OTHERS)


def load_head(path: Path, model: Decoder, *, quantize: str | None = None, max_position: int) -> Head:
    """Load the head in a folder for a model. It gets the model's dtype.

    `quantize`: see `load_model`. `max_position`: the longest context.

    Raises:
        ModelLoadError: the head is of another model or of a kind that is not supported, or names each
            missing, unexpected or mis-shaped tensor.
    """
    if model.streams is not None:
        raise ModelLoadError(f"{path.name}: heads for models with several residual streams are not supported")
    fields = read_fields(path / _CONFIG)
    load = load_mtp if is_mtp(fields) and not is_eagle3(fields) else load_eagle3
    return load(path, model, quantize=quantize, max_position=max_position)
