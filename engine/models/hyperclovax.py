"""HyperCLOVA X: Granite's scales, with norms before and after each half of a layer."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import decoder_config, uniform_windows, with_attention, with_scales


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
    config = with_scales(with_attention(config, scale=scale), fields)
    # Granite divides the logits by the field, HyperCLOVA X multiplies them.
    return replace(config, post_norms=after, logits_scale=1 / config.logits_scale)
