"""Code World Model: Llama 3 in which three of four layers have a window."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import decoder_config, windows_by_type


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """CWM's `config.json`. Its scaling of the rotary embedding has no default here."""
    if "rope_parameters" not in fields and "rope_scaling" not in fields:
        raise fields.error("rope_parameters", "is missing")
    windowed = [layer % 4 != 0 for layer in range(fields.size("num_hidden_layers"))]
    return decoder_config(
        architecture,
        fields,
        windows=windows_by_type(fields, fields.size("sliding_window", default=8192), windowed),
        head_dim=128,
        mlp_bias=fields.get("mlp_bias", False),
        default_eps=1e-5,
        default_theta=1000000.0,
    )
