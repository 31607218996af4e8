"""Hunyuan's dense models: q and k are normalised per head, after the rotary embedding."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.rotary import RopeConfig
from personae.engine.models.common import (
    decoder_config,
    rope_config,
    rope_section,
    uniform_windows,
    with_attention,
)


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Hunyuan's `config.json`. `attention_bias` covers q, k, v and o."""
    bias, windows = fields.get("attention_bias", False), uniform_windows(fields, None)
    fields.raw("eod_token_id")
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    dim = fields.size("head_dim", default=max(1, hidden // heads))
    config = decoder_config(
        architecture,
        fields,
        windows=windows,
        ropes=(_rope(fields, dim),) * len(windows),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        default_eps=1e-5,
    )
    return with_attention(config, normed_after_rope=True, norms=("query_layernorm", "key_layernorm"))


def _rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Type `dynamic` with `alpha` is a larger base for all lengths. The other keys of that type change
    nothing."""
    rope, plain = rope_section(fields), rope_config(fields, dynamic=True)
    if "alpha" not in rope:
        return plain
    for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        rope.raw(name)
    return replace(plain, theta=plain.theta * rope.number("alpha") ** (head_dim / (head_dim - 2)))
