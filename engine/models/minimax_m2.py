"""MiniMax M2: experts chosen by sigmoid with a correction. q and k are normalised over all heads, and a part
of each head is rotated."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.moe import MoeSpec
from personae.engine.models.common import activation, decoder_config, experts, uniform_windows
from personae.errors import as_json
from personae.kernels.moe import Routing

SERVED = {
    **dict.fromkeys(("use_qk_norm", "use_routing_bias"), True),
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
}
"""What the makers' files say about the only form that there is."""


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """MiniMax M2's `config.json`."""
    for name, served in SERVED.items():
        if fields.raw(name) not in (None, served):
            raise fields.error(name, f"only {as_json(served)} is supported")
    kinds = fields.raw("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or {*kinds} != {1}):
        raise fields.error("attn_type_list", "only full attention, 1, is supported")
    windows, dim = uniform_windows(fields, None), fields.size("head_dim", default=128)
    turned = fields.size("rotary_dim", default=dim)
    if turned > dim:
        raise fields.error("rotary_dim", f"{turned} is more than the head's {dim}")
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
        partial_rope=turned / dim,
    )
