"""Mellum 2: Qwen3-MoE with windows and with a rotary embedding of their own in some layers."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.moe import MoeSpec
from personae.engine.models.common import (
    activation,
    decoder_config,
    experts,
    ropes_by_window,
    sparse_layers,
    windows_by_type,
)
from personae.kernels.moe import Routing


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Mellum's `config.json`. `attention_bias` covers q, k, v and o."""
    bias, layers = fields.get("attention_bias", False), fields.size("num_hidden_layers")
    windows = windows_by_type(fields, fields.size("sliding_window", default=1024), [False] * layers)
    count, top_k = experts(fields)
    moe = MoeSpec(
        count,
        fields.size("moe_intermediate_size"),
        Routing(top_k, fields.get("norm_topk_prob", True)),
        activation=activation(fields),
    )
    dense = MlpSpec(fields.size("intermediate_size", default=7168), activation(fields))
    return decoder_config(
        architecture,
        fields,
        windows=windows,
        ropes=ropes_by_window(fields, windows, local="rope_theta", theta=500000.0, local_theta=10000.0),
        head_dim=128,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        mlps=sparse_layers(fields, dense, moe, first=None),
    )
