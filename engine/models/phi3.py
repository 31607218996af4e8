"""Phi-3, Phi-3.5 and Phi-4: Llama with merged q, k and v, merged gate and up, and LongRoPE. Phi-4-mini
rotates only a part of each head."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.rotary import RopeConfig
from personae.engine.models.common import decoder_config, rope_section, rope_theta, rope_type, uniform_windows

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
    longest = fields.size("max_position_embeddings")
    place = rope if "original_max_position_embeddings" in rope else fields
    original = place.size("original_max_position_embeddings", default=4096)
    kind = rope_type(rope)
    if kind == "default":
        return RopeConfig(theta, share=share)
    if kind not in LONGROPE:
        raise rope.error("rope_type", f"{kind!r} is not supported, only default and longrope")
    return RopeConfig(
        theta,
        "longrope",
        share=share,
        factor=rope.number("factor") if "factor" in rope else longest / original,
        original_max_position=original,
        attention_factor=rope.optional_number("attention_factor"),
        short_factors=_factors(rope, "short_factor", pairs),
        long_factors=_factors(rope, "long_factor", pairs),
    )


def _factors(rope: Fields, name: str, pairs: int) -> tuple[float, ...]:
    values = rope.raw(name)
    if not isinstance(values, list) or len(values) != pairs:
        raise rope.error(name, f"expected a list of {pairs} numbers")
    for value in values:
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise rope.error(name, f"{value!r} is not a number over 0")
    return tuple(map(float, values))
