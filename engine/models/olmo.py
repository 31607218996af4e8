"""OLMo 2 and 3.

Each half of a layer has a norm after it and none before it. The norms of q and k are over all heads. In OLMo
3 three of four layers have a window.
"""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import (
    AFTER,
    decoder_config,
    ropes_by_window,
    uniform_windows,
    windows_by_type,
)


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """OLMo's `config.json`. `attention_bias` covers q, k, v and o. OLMo 3's rope scaling applies to the
    layers without a window."""
    bias, ropes = fields.get("attention_bias", False), None
    if architecture == "Olmo2ForCausalLM":
        windows, theta = uniform_windows(fields, None), 10000.0
    else:
        layers = fields.size("num_hidden_layers")
        theta = 500000.0
        windowed = [(layer + 1) % 4 != 0 for layer in range(layers)]
        windows = windows_by_type(fields, fields.size("sliding_window", default=4096), windowed)
        ropes = ropes_by_window(fields, windows, local="rope_theta", theta=theta, local_theta=theta)
    config = decoder_config(
        architecture,
        fields,
        windows=windows,
        ropes=ropes,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="all",
        default_eps=1e-5,
        default_theta=theta,
    )
    return replace(config, pre_norms=None, post_norms=AFTER)
