"""HyperCLOVA X: Granite's scales, with norms before and after each half of a layer."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import decoder_config, scales, uniform_windows, with_attention


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """HyperCLOVA X' `config.json`. `attention_bias` covers q, k, v and o."""
    bias = fields.get("attention_bias", False)
    config = decoder_config(
        architecture,
        fields,
        windows=uniform_windows(fields, None),
        head_dim=128,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.get("mlp_bias", False),
    )
    dim = fields.size("head_dim", default=128)
    scale = fields.number("attention_multiplier", default=dim**-0.5)
    after = ("post_norm1", "post_norm2") if fields.get("use_post_norm", True) else None
    found = scales(fields)
    found["logits_scale"] = 1 / found["logits_scale"]  # Granite divides by it
    return replace(with_attention(config, scale=scale), post_norms=after, **found)
