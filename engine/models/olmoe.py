"""OLMoE and FlexOlmo: a mixture of experts in every layer. The norms of q and k are over all heads. FlexOlmo
has OLMo 2's norms, after each half of a layer."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.moe import MoeSpec
from personae.engine.models.common import AFTER, activation, decoder_config, experts, uniform_windows
from personae.kernels.moe import Routing


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """The `config.json` of both; `attention_bias` covers q, k, v and o."""
    if fields.raw("clip_qkv") is not None:
        raise fields.error("clip_qkv", "is not supported")
    flex = architecture == "FlexOlmoForCausalLM"
    bias, windows = fields.get("attention_bias", False), uniform_windows(fields, None)
    count, top_k = experts(fields)
    moe = MoeSpec(
        count,
        fields.size("intermediate_size"),
        Routing(top_k, fields.get("norm_topk_prob", False)),
        activation=activation(fields),
    )
    config = decoder_config(
        architecture,
        fields,
        windows=windows,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="all",
        mlps=[moe] * len(windows),
        default_eps=1e-6 if flex else 1e-5,
        default_theta=500000.0 if flex else 10000.0,
    )
    return replace(config, pre_norms=None, post_norms=AFTER) if flex else config
