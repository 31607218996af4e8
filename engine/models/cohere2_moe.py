"""Command A's successors with experts: Cohere 2 whose layers, but for dense first ones, have experts and may
have shared ones. Dense layers may be rotated without a window; norms may be RMS norms."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.block import BlockSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.moe import MoeSpec
from personae.engine.models.cohere import NORM
from personae.engine.models.common import (
    activation,
    decoder_config,
    experts,
    sparse_layers,
    windows_by_type,
)
from personae.errors import as_json
from personae.kernels.moe import Routing


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """The family's `config.json`. Experts and shared ones are added up or averaged, as
    `shared_expert_combination_strategy` says."""
    layers, mlps = fields.size("num_hidden_layers"), _mlps(fields)
    dense_layers = fields.size("first_k_dense_replace", default=0, zero=True)
    every = fields.size("sliding_window_pattern", default=4)
    every_dense = fields.size("prefix_dense_sliding_window_pattern", default=1)
    windowed = [
        (layer + 1) % every_dense != 0 if layer < dense_layers else (layer - dense_layers + 1) % every != 0
        for layer in range(layers)
    ]
    windows = windows_by_type(fields, fields.size("sliding_window", default=4096), windowed)
    rotated = [
        window is not None or (isinstance(mlp, MlpSpec) and every_dense == 1)
        for window, mlp in zip(windows, mlps, strict=True)
    ]
    root = "rms_norm_eps" in fields
    bias = fields.get("attention_bias", False)
    config = decoder_config(
        architecture,
        fields,
        windows=windows,
        rotated=rotated,
        head_dim=128,
        qkv_bias=bias,
        o_bias=bias,
        mlps=mlps,
        eps="rms_norm_eps" if root else "layer_norm_eps",
        default_eps=1e-5,
        interleaved=True,
        tie=True,
    )
    fields.raw("layer_norm_eps")  # files with RMS norms have it, too
    return replace(
        config,
        pre_norms=NORM,
        parallel=True,
        norm="rms" if root else "layer",
        logits_scale=fields.number("logit_scale", default=0.0625),
    )


def _mlps(fields: Fields) -> list[BlockSpec]:
    """The MLP of each layer."""
    gate, size = activation(fields), fields.size("intermediate_size")
    count, top_k = experts(fields)
    score = fields.get("expert_selection_fn", "softmax")
    if score not in ("softmax", "sigmoid"):
        raise fields.error("expert_selection_fn", f"{as_json(score)} is not supported")
    renormalize = fields.get("norm_topk_prob", True)
    shared = fields.size("num_shared_experts", default=0, zero=True)
    how = fields.get("shared_expert_combination_strategy", "average")
    if how not in ("average", "sum"):
        raise fields.error("shared_expert_combination_strategy", f"{as_json(how)} is not supported")
    share = 0.5 if shared and how == "average" else 1.0
    sparse = MoeSpec(
        count,
        size,
        Routing(top_k, renormalize, "sigmoid", scale=share)
        if score == "sigmoid"
        else Routing(top_k, renormalize=True, scale=share),
        activation=gate,
        shared=MlpSpec(shared * size, gate, path="mlp.shared_experts", key="shared_", scales=(1.0, share))
        if shared
        else None,
    )
    dense = MlpSpec(fields.size("prefix_dense_intermediate_size", default=size), gate)
    return sparse_layers(fields, dense, sparse)
