"""Qwen3 with mixtures of experts (30B-A3B, 235B-A22B). All layers have experts, except those that
`mlp_only_layers` and `decoder_sparse_step` leave dense."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.block import BlockSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.moe import MoeSpec
from personae.engine.models.common import (
    activation,
    decoder_config,
    experts,
    switched_window,
    uniform_windows,
)
from personae.kernels.moe import Routing


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Qwen3-MoE's `config.json`."""
    bias = fields.get("attention_bias", False)
    count, top_k = experts(fields)
    gate, step = activation(fields), fields.size("decoder_sparse_step", default=1)
    dense: BlockSpec = MlpSpec(fields.size("intermediate_size"), gate)
    mixed: BlockSpec = MoeSpec(
        count,
        fields.size("moe_intermediate_size"),
        Routing(top_k, fields.get("norm_topk_prob", False)),
        activation=gate,
    )
    plain = fields.raw("mlp_only_layers") or []
    return decoder_config(
        architecture,
        fields,
        windows=uniform_windows(fields, switched_window(fields)),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        mlps=[
            dense if layer in plain or (layer + 1) % step else mixed
            for layer in range(fields.size("num_hidden_layers"))
        ],
    )
