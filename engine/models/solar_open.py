"""Solar Open: experts chosen by sigmoid with a correction, and a shared expert, in every layer."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import decoder_config, grouped_experts, uniform_windows


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Solar Open's `config.json`. `attention_bias` covers q, k and v."""
    windows = uniform_windows(fields, None)
    return decoder_config(
        architecture,
        fields,
        windows=windows,
        head_dim=128,
        qkv_bias=fields.get("attention_bias", False),
        mlps=[grouped_experts(fields)] * len(windows),
        default_eps=1e-5,
        default_theta=1000000.0,
        partial_rope=1.0,
    )
