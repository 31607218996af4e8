"""Gemma 3's decoder.

Five of six layers have a window, with a rotary embedding of their own. It has GELU, and norms before and
after each half of a layer.
"""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import (
    AFTER,
    SANDWICH,
    activation,
    decoder_config,
    ropes_by_window,
    text_fields,
    windows_by_type,
)

DEFAULTS = {  # transformers' defaults; the files of 4B, 12B and 27B only have what differs
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
UNSERVED = ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention")


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Gemma 3's `config.json`."""
    images, fields = "text_config" in fields, text_fields(fields, "gemma3_text", **DEFAULTS)
    for name in UNSERVED:
        if fields.raw(name):
            raise fields.error(name, "is not supported")
    layers = fields.size("num_hidden_layers")
    every = fields.size("sliding_window_pattern", default=fields.size("_sliding_window_pattern", default=6))
    windowed = [(layer + 1) % every != 0 for layer in range(layers)]
    windows = windows_by_type(fields, fields.size("sliding_window", default=4096), windowed)
    ropes = ropes_by_window(
        fields, windows, local="rope_local_base_freq", theta=1000000.0, local_theta=10000.0
    )
    bias = fields.get("attention_bias", False)
    config = decoder_config(
        architecture,
        fields,
        windows=windows,
        ropes=ropes,
        head_dim=256,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        attention_scale=fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        gate=activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        tie=True,
        images=images,
    )
    return replace(
        config,
        pre_norms=SANDWICH,
        post_norms=AFTER,
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
    )
