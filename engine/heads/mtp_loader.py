"""Loads the layer of an MTP checkpoint: from the served model's own folder, or one with that layer alone."""

from pathlib import Path

from personae.engine.checkpoints.huggingface import MTP, Folder
from personae.engine.config import ModelConfig
from personae.engine.config_file import read_config
from personae.engine.fields import Fields, read_fields
from personae.engine.heads.fitting import check_sizes, fill
from personae.engine.heads.mtp import LAYER, MtpHead
from personae.engine.models.decoder import Decoder
from personae.engine.quantization import scheme_of
from personae.errors import ModelLoadError, as_json

FAMILIES = ("MiMoForCausalLM",)
_CONFIG, _COUNT = "config.json", "num_nextn_predict_layers"


def is_mtp(fields: Fields) -> bool:
    """Whether the fields of a `config.json` name layers for further tokens. Raises ModelLoadError if it is no
    number."""
    return fields.size(_COUNT, default=0, zero=True) > 0


def has_mtp(path: Path) -> bool:
    """Whether there is a folder whose `config.json` names layers for further tokens. Raises ModelLoadError if
    that cannot be read."""
    return (path / _CONFIG).is_file() and is_mtp(read_fields(path / _CONFIG))


def load_mtp(path: Path, model: Decoder, *, quantize: str | None, max_position: int) -> MtpHead:
    """See `load_head`. Of a folder with a whole model it reads that layer only."""
    config = _config(path)
    check_sizes(model, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    stored = {name: tensor for name, tensor in Folder(path).stored().items() if name.startswith(MTP)}
    if not stored:
        raise ModelLoadError(
            f"The weights have no tensors {LAYER}.…, although config.json has {_COUNT}. Quantized or "
            "converted copies may lack them; use the makers' own files."
        )
    head = MtpHead(config, model, max_position=max_position, scheme=scheme_of(quantize))
    fill(head, stored)
    return head


def _config(path: Path) -> ModelConfig:
    fields = read_fields(path / _CONFIG)
    names = fields.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in [*FAMILIES]:
        raise fields.error(
            "architectures",
            f"the MTP layers of {as_json(names)} are not supported, only {', '.join(FAMILIES)}",
        )
    config = read_config(path)
    if config.mtp_layers != 1:
        raise fields.error(_COUNT, f"one layer is supported, not {config.mtp_layers}")
    return config
