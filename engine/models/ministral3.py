"""Ministral 3: Mistral with YaRN, and with q scaled by its position."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import (
    decoder_config,
    read_rope,
    rope_section,
    text_fields,
    uniform_windows,
    with_attention,
)


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Ministral 3's `config.json`. Its scaling of the rotary embedding has no default here."""
    images, fields = "text_config" in fields, text_fields(fields, "ministral3")
    rope = rope_section(fields)
    if "rope_parameters" not in fields:
        raise fields.error("rope_parameters", "is missing")
    window = fields.size("sliding_window") if "sliding_window" in fields else None
    beta = rope.optional_number("llama_4_scaling_beta")
    original = rope.size("original_max_position_embeddings") if beta else 0
    rope.raw("max_position_embeddings")
    config = decoder_config(
        architecture,
        fields,
        windows=uniform_windows(fields, window),
        ropes=(read_rope(rope, fields, 1000000.0, scaled=True),) * fields.size("num_hidden_layers"),
        head_dim=128,
        default_eps=1e-5,
        images=images,
    )
    return with_attention(config, position_scale=(beta, original, 0) if beta else None)
