"""OLMo 2 and 3: norms after each half of a layer and none before, and over all heads of q and of k; in OLMo 3
windows in three layers of four."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import decoder_config, ropes_by_window, uniform_windows, windows_by_type


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """OLMo's `config.json`; `attention_bias` covers q, k, v and o. What stretches OLMo 3's rotary embedding
    is for the layers without a window."""
    bias, ropes = fields.get("attention_bias", False), None
    if architecture == "Olmo2ForCausalLM":
        windows = uniform_windows(fields, None)
    else:
        layers = fields.size("num_hidden_layers")
        windowed = [(layer + 1) % 4 != 0 for layer in range(layers)]
        windows = windows_by_type(fields, fields.size("sliding_window", default=4096), windowed)
        ropes = ropes_by_window(fields, windows, local="rope_theta", theta=500000.0, local_theta=500000.0)
    config = decoder_config(
        architecture,
        fields,
        windows=windows,
        ropes=ropes,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="all",
        default_eps=1e-5,
        default_theta=500000.0,
    )
    return replace(config, pre_norms=False, post_norms=True)
