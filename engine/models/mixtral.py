"""Mixtral: Mistral with a mixture of experts in every layer. A token's expert weights add up to 1."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.moe import MoeSpec
from personae.engine.models.common import activation, decoder_config, experts, uniform_windows
from personae.kernels.moe import Routing


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Mixtral's `config.json`."""
    window = fields.size("sliding_window") if "sliding_window" in fields else None
    windows = uniform_windows(fields, window)
    count, top_k = experts(fields)
    moe = MoeSpec(
        count,
        fields.size("intermediate_size"),
        Routing(top_k, True),
        activation=activation(fields),
        path="block_sparse_moe",
        module="mlp",
        names=("w1", "w3", "w2"),
    )
    return decoder_config(
        architecture,
        fields,
        windows=windows,
        mlps=[moe] * len(windows),
        default_eps=1e-5,
        default_theta=1000000.0,
    )
