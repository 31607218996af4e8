"""InternLM 3: Llama with a head size of its own."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import decoder_config, uniform_windows


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """InternLM 3's `config.json`. `attention_bias` covers q, k, v and o; in the makers' own files it is
    `qkv_bias` and `bias`."""
    bias = fields.get("attention_bias", False)
    other = fields.get("bias", False)
    return decoder_config(
        architecture,
        fields,
        windows=uniform_windows(fields, None),
        head_dim=128,
        qkv_bias=bias or fields.get("qkv_bias", False),
        o_bias=bias or other,
        mlp_bias=fields.get("mlp_bias", False) or other,
        default_eps=1e-5,
    )
