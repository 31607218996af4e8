"""ERNIE 4.5, dense and with experts: Llama with an interleaved rotary embedding.

The experts are chosen by softmax with a correction. Some layers are dense, and every token uses an MLP too.
"""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.moe import MoeSpec
from personae.engine.models.common import activation, decoder_config, experts, uniform_windows
from personae.kernels.moe import Routing


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """ERNIE 4.5's `config.json`. `use_bias` covers all linear modules of a layer."""
    bias, windows = fields.get("use_bias", False), uniform_windows(fields, None)
    mixed = architecture == "Ernie4_5_MoeForCausalLM"
    if mixed and bias:
        raise fields.error("use_bias", "is not supported with experts")
    dense = MlpSpec(fields.size("intermediate_size"), activation(fields), bias)
    mlps = None
    if mixed:
        sparse, layers = _experts(fields), len(windows)
        first = fields.size("moe_layer_start_index", default=1, zero=True)
        last = fields.raw("moe_layer_end_index")
        last = layers - 1 if last in (None, -1) else fields.size("moe_layer_end_index", zero=True)
        every = fields.size("moe_layer_interval", default=1)
        mlps = [
            sparse if (layer + 1) % every == 0 and first <= layer <= last else dense
            for layer in range(layers)
        ]
    return decoder_config(
        architecture,
        fields,
        windows=windows,
        head_dim=None if mixed else 128,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        mlps=mlps,
        default_eps=1e-5,
        default_theta=500000.0,
        interleaved=True,
        tie=True,
    )


def _experts(fields: Fields) -> MoeSpec:
    count, top_k = experts(fields)
    size = fields.size("moe_intermediate_size")
    shared = fields.size("moe_num_shared_experts", default=2, zero=True) * size
    return MoeSpec(
        count,
        size,
        Routing(top_k, renormalize=True, least=fields.number("moe_norm_min", default=1e-12)),
        activation=activation(fields),
        correction="moe_statics.e_score_correction_bias",
        correction_shape=(1, count),
        shared=MlpSpec(shared, activation(fields), path="mlp.shared_experts", key="shared_")
        if shared
        else None,
    )
