"""GLM-4 (9B, 32B) of 2024 and 2025: half of each head is rotated, interleaved, and gate and up are one
module. GLM-4-0414 also has norms after each half of a layer."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.mlp import MlpSpec
from personae.engine.models.common import activation, decoder_config, uniform_windows

PRE = ("input_layernorm", "post_attention_layernorm")
POST = ("post_self_attn_layernorm", "post_mlp_layernorm")


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """GLM's `config.json`. `attention_bias` covers q, k and v."""
    windows = uniform_windows(fields, None)
    mlp = MlpSpec(fields.size("intermediate_size"), activation(fields), merged=True)
    config = decoder_config(
        architecture,
        fields,
        windows=windows,
        head_dim=128,
        qkv_bias=fields.get("attention_bias", True),
        mlps=[mlp] * len(windows),
        default_eps=1.5625e-7,
        partial_rope=0.5,
        interleaved=True,
    )
    return config if architecture == "GlmForCausalLM" else replace(config, pre_norms=PRE, post_norms=POST)
