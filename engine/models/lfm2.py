"""LFM2: short convolutions in most layers, attention with norms of q and k in the others; and its mixture of
experts."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.block import BlockSpec, LayerSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.moe import MoeSpec
from personae.engine.layers.short_convolution import ShortConvolutionSpec
from personae.engine.models.common import decoder_config, experts, layer_kinds, with_attention
from personae.errors import as_json
from personae.kernels.moe import Routing

NAMES = ("w1", "w3", "w2")


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """LFM2's `config.json`. Files have `tie_embedding` or `tie_word_embeddings`, and other names of sizes."""
    names = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    given = {new: fields.raw(old) for old, new in names.items() if old in fields}
    fields = fields.within({"norm_eps": 1e-5}, given)
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        if fields.size(name, default=fields.size("hidden_size")) != fields.size("hidden_size"):
            raise fields.error(name, "only the hidden size is supported")
    (
        fields.raw("block_norm_eps"),
        fields.raw("num_heads"),
        fields.raw("use_pos_enc"),
    )  # transformers reads others
    layers, moe = fields.size("num_hidden_layers"), architecture == "Lfm2MoeForCausalLM"
    if moe:
        if "layer_types" not in fields:
            raise fields.error("layer_types", "is missing")
        kinds = layer_kinds(fields, ("conv", "full_attention"), ())
    else:
        attending = fields.raw("full_attn_idxs")
        if attending is None:
            attending = [*range(layers)]
        if not isinstance(attending, list):
            raise fields.error("full_attn_idxs", f"expected a list of numbers, found {as_json(attending)}")
        usual = ["full_attention" if layer in attending else "conv" for layer in range(layers)]
        kinds = layer_kinds(fields, ("conv", "full_attention"), usual)
    dense = MlpSpec(_inner_size(fields, adjusted=not moe), path="feed_forward", names=NAMES)
    mlps: list[BlockSpec] = [dense] * layers
    if moe:
        first = fields.size("num_dense_layers", default=2, zero=True)
        mlps[first:] = [_experts(fields)] * (layers - first)
    config = decoder_config(
        architecture,
        fields,
        windows=(None,) * layers,
        qk_norm="head",
        mlps=mlps,
        eps="norm_eps",
        default_theta=1000000.0,
        tie=True,
    )
    config = with_attention(config, output="out_proj", norms=("q_layernorm", "k_layernorm"))
    convolution = ShortConvolutionSpec(
        config.hidden_size, fields.size("conv_L_cache", default=3), fields.get("conv_bias", False)
    )
    return replace(
        config,
        layer_specs=tuple(
            LayerSpec(convolution, layer.mlp) if kind == "conv" else layer
            for kind, layer in zip(kinds, config.layer_specs, strict=True)
        ),
        pre_norms=("operator_norm", "ffn_norm"),
        final_norm="model.embedding_norm",
    )


def _inner_size(fields: Fields, *, adjusted: bool) -> int:
    """The size of a dense layer's inner vectors: the file's, or what LFM2 makes of it."""
    size = fields.size("intermediate_size")
    if not adjusted:
        return size
    multiple = fields.size("block_multiple_of", default=256)
    factor = fields.number("block_ffn_dim_multiplier", default=1.0)
    if not fields.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(factor * int(2 * size / 3))
    return -(-size // multiple) * multiple


def _experts(fields: Fields) -> MoeSpec:
    """Chosen by sigmoid with a correction."""
    count, top_k = experts(fields)
    return MoeSpec(
        count,
        fields.size("moe_intermediate_size"),
        Routing(
            top_k,
            fields.get("norm_topk_prob", True),
            "sigmoid",
            scale=fields.number("routed_scaling_factor", default=1.0),
            epsilon=1e-6,
        ),
        path="feed_forward",
        names=NAMES,
        correction="expert_bias" if fields.get("use_expert_bias", True) else None,
    )
