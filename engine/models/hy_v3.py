"""Hunyuan 3: experts chosen by sigmoid with a correction, a shared expert, and a dense first layer. Layers
for further tokens are not used."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.moe import MoeSpec
from personae.engine.models.common import (
    activation,
    decoder_config,
    experts,
    sparse_layers,
    uniform_windows,
)
from personae.kernels.moe import Routing


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Hunyuan 3's `config.json`. `attention_bias` covers q, k, v and o."""
    bias = fields.get("attention_bias", False)
    fields.get("enable_moe_fp32_combine", True)  # the rounding of one sum
    if fields.get("mlp_bias", False):
        raise fields.error("mlp_bias", "is not supported")
    count, top_k = experts(fields)
    gate, size = activation(fields), fields.size("moe_intermediate_size")
    shared = fields.size("num_shared_experts", default=1) * size
    sparse = MoeSpec(
        count,
        size,
        Routing(
            top_k,
            renormalize=True,
            score="sigmoid",
            scale=fields.number("router_scaling_factor", default=2.826),
            epsilon=1e-20,
        ),
        activation=gate,
        router="router.gate",
        router_module="gate",
        correction="expert_bias",
        shared=MlpSpec(shared, gate, path="mlp.shared_mlp", key="shared_", module="mlp.shared_experts"),
    )
    dense, layers = MlpSpec(fields.size("intermediate_size"), gate), fields.size("num_hidden_layers")
    mlps = sparse_layers(fields, dense, sparse, first=None)
    if "mlp_layer_types" not in fields:
        mlps = [dense, *[sparse] * (layers - 1)]
    config = decoder_config(
        architecture,
        fields,
        windows=uniform_windows(fields, None),
        head_dim=128,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        mlps=mlps,
        default_eps=1e-5,
        default_theta=11158840.0,
    )
    return replace(config, mtp_layers=fields.size("num_nextn_predict_layers", default=0, zero=True))
