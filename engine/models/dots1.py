"""dots.llm1: Qwen3's attention; experts chosen by sigmoid with a correction, shared experts, dense first
layers."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.mlp import MlpSpec
from personae.engine.models.common import (
    activation,
    decoder_config,
    grouped_experts,
    sparse_layers,
    windows_by_type,
)


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """dots.llm1's `config.json`. `attention_bias` covers q, k, v and o. A window stands in files whose layers
    have none."""
    bias, layers = fields.get("attention_bias", False), fields.size("num_hidden_layers")
    window = None
    if "sliding_window" in fields or not fields.given("sliding_window"):
        window = fields.size("sliding_window", default=4096)
    first = fields.size("max_window_layers", default=62)
    windowed = [window is not None and layer >= first for layer in range(layers)]
    dense = MlpSpec(fields.size("intermediate_size"), activation(fields))
    return decoder_config(
        architecture,
        fields,
        windows=windows_by_type(fields, window, windowed),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        mlps=sparse_layers(fields, dense, grouped_experts(fields, default_shared=0, renormalize=False)),
    )
