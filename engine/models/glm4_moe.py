"""GLM-4.5, 4.6 and 4.7: experts chosen by sigmoid with a correction, a shared expert, and dense first layers.
Half of each head is rotated. Its layers for further tokens are not used."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.mlp import MlpSpec
from personae.engine.models.common import (
    activation,
    decoder_config,
    grouped_experts,
    sparse_layers,
    uniform_windows,
)


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """GLM-4.5's `config.json`. `attention_bias` covers q, k and v."""
    dense = MlpSpec(fields.size("intermediate_size"), activation(fields))
    config = decoder_config(
        architecture,
        fields,
        windows=uniform_windows(fields, None),
        qkv_bias=fields.get("attention_bias", False),
        qk_norm="head" if fields.get("use_qk_norm", False) else None,
        mlps=sparse_layers(fields, dense, grouped_experts(fields), first=1),
        default_eps=1e-5,
        partial_rope=0.5,
    )
    layers = fields.size("num_nextn_predict_layers", default=1, zero=True)
    return replace(config, mtp_layers=layers)
