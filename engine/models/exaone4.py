"""EXAONE 4 and its mixture of experts, K-EXAONE.

Three of four layers have a window, and only those have a rotary embedding. q and k are normalised per head.
EXAONE 4 has a norm after each half of a layer and none before it; K-EXAONE has them before.
"""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.mlp import MlpSpec
from personae.engine.models.common import (
    AFTER,
    activation,
    decoder_config,
    grouped_experts,
    sparse_layers,
    windows_by_type,
)


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """EXAONE 4's and K-EXAONE's `config.json`. Without a window all layers are full and rotated."""
    layers, mixed = fields.size("num_hidden_layers"), architecture == "ExaoneMoeForCausalLM"
    window = None
    if "sliding_window" in fields or not fields.given("sliding_window"):
        window = fields.size("sliding_window", default=4096)
    every = fields.raw("sliding_window_pattern")
    every = every if type(every) is int and every > 0 else 4
    windowed = [window is not None and (layer + 1) % every != 0 for layer in range(layers)]
    windows = windows_by_type(fields, window, windowed)
    mlps = None
    if mixed:
        dense = MlpSpec(fields.size("intermediate_size"), activation(fields))
        sparse = grouped_experts(
            fields, shared="num_shared_experts", default_scale=2.5, correction="e_score_correction_bias"
        )
        mlps = sparse_layers(fields, dense, sparse, first=1)
    config = decoder_config(
        architecture,
        fields,
        windows=windows,
        rotated=[window is None or own is not None for own in windows],
        qk_norm="head",
        mlps=mlps,
        default_eps=1e-5,
    )
    return config if mixed else replace(config, pre_norms=None, post_norms=AFTER)
