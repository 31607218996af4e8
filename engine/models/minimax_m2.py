"""MiniMax M2: experts chosen by sigmoid with a correction. q and k are normalised over all heads, and a part
of each head is rotated."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.moe import MoeSpec
from personae.engine.models.common import activation, decoder_config, experts, uniform_windows
from personae.kernels.moe import Routing


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """MiniMax M2's `config.json`."""
    windows = uniform_windows(fields, None)
    count, top_k = experts(fields)
    moe = MoeSpec(
        count,
        fields.size("intermediate_size"),
        Routing(top_k, renormalize=True, score="sigmoid"),
        activation=activation(fields),
        path="block_sparse_moe",
        module="mlp",
        names=("w1", "w3", "w2"),
        correction="e_score_correction_bias",
    )
    return decoder_config(
        architecture,
        fields,
        windows=windows,
        head_dim=128,
        qk_norm="all",
        mlps=[moe] * len(windows),
        default_theta=5000000.0,
        partial_rope=1.0,
    )
