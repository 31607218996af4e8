"""Reads a model folder's `config.json`, strictly.

`ModelConfig` holds exactly what the decoder needs, in one form for all families and file versions. If a field
would change the model's arithmetic and is not understood, loading fails with its name. So a model that loads
is computed as its makers intended.

The fields are those of Hugging Face transformers, versions 4 (`rope_theta`, `rope_scaling`, `torch_dtype`)
and 5 (`rope_parameters`, `dtype`).
"""

from pathlib import Path

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields, read_fields
from personae.engine.models import FAMILIES, MODEL_TYPES, family
from personae.engine.models.config_keys import check_unread
from personae.errors import as_json


def read_config(folder: Path) -> ModelConfig:
    """Reads `config.json` of a Hugging Face model folder.

    Raises:
        ModelLoadError: a file or field is missing, malformed or not supported. The error names the field.
    """
    fields = read_fields(folder / "config.json")
    name = _architecture(fields)
    translate = family(name)
    if translate is None:
        raise fields.error(
            "architectures", f"{as_json(name)} is not supported; supported are: {', '.join(FAMILIES)}"
        )
    config = translate(name, fields)
    check_unread(fields, name)
    return config


def _architecture(fields: Fields) -> str:
    """The architecture that the file names, or else the one of its `model_type`: if it names none, or
    Llama's, as transformers writes it for families that it runs with Llama's class."""
    names, kind = fields.raw("architectures"), fields.raw("model_type")
    if names is None and kind is not None:
        if not isinstance(kind, str) or kind not in MODEL_TYPES:
            known = ", ".join(MODEL_TYPES)
            raise fields.error(
                "model_type", f"{as_json(kind)} is not supported without architectures, only {known}"
            )
        return MODEL_TYPES[kind]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", f"expected a list of one name, found {as_json(names)}")
    if names[0] == MODEL_TYPES["llama"] and isinstance(kind, str):
        return MODEL_TYPES.get(kind, names[0])
    return names[0]
