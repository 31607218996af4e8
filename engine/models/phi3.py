"""Phi-3, Phi-3.5 and Phi-4: Llama with merged q, k and v, merged gate and up, and LongRoPE. Phi-4-mini
rotates only a part of each head."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.rotary import RopeConfig
from personae.engine.models.common import (
    decoder_config,
    long_rope,
    rope_section,
    rope_theta,
    rope_type,
    uniform_windows,
)
from personae.errors import as_json

LONGROPE = ("longrope", "su", "yarn")  # all of these mean LongRoPE here


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Phi-3's `config.json`. `sliding_window` is often longer than the context; it is not changed."""
    window = fields.size("sliding_window") if "sliding_window" in fields else None
    windows = uniform_windows(fields, window)
    ropes = (phi_rope(fields),) * len(windows)
    return decoder_config(architecture, fields, windows=windows, ropes=ropes, merged=True, default_eps=1e-5)


def phi_rope(fields: Fields) -> RopeConfig:
    """The rotary embedding: plain or LongRoPE, over `partial_rotary_factor` of the head."""
    rope = rope_section(fields)
    theta = rope_theta(rope, fields, 10000.0)
    place = rope if "partial_rotary_factor" in rope else fields
    share = place.number("partial_rotary_factor", default=1.0, high=1.0)
    dim = fields.size("head_dim", default=fields.size("hidden_size") // fields.size("num_attention_heads"))
    pairs, odd = divmod(int(dim * share), 2)
    if odd or not pairs:
        raise place.error("partial_rotary_factor", f"{share:g} of {dim} dimensions cannot form pairs")
    kind = rope_type(rope)
    if kind == "default":
        fields.raw("original_max_position_embeddings")  # only LongRoPE needs it
        return RopeConfig(theta, share=share)
    if kind not in LONGROPE:
        raise rope.error("rope_type", f"{as_json(kind)} is not supported, only default and longrope")
    return replace(long_rope(rope, fields, theta, pairs, original=4096), share=share)
