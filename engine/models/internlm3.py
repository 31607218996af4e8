"""InternLM 3: Llama with a head size of its own."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import decoder_config, rope_config, uniform_windows


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """InternLM 3's `config.json`. The makers' own files have `qkv_bias` and `bias` for `attention_bias` and
    `mlp_bias`. As in transformers, only equal ones are served."""
    attention, mlp = (
        fields.get(name, fields.get(other, False))
        for name, other in (("attention_bias", "qkv_bias"), ("mlp_bias", "bias"))
    )
    if attention != mlp:
        raise fields.error("attention_bias", f"{attention} is not supported with mlp_bias {mlp}")
    windows = uniform_windows(fields, None)
    return decoder_config(
        architecture,
        fields,
        windows=windows,
        ropes=(rope_config(fields, dynamic=True),) * len(windows),
        head_dim=128,
        qkv_bias=attention,
        o_bias=attention,
        mlp_bias=mlp,
        default_eps=1e-5,
    )
