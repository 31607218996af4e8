"""Qwen2 with mixtures of experts (Qwen1.5-MoE, Qwen2-57B-A14B): every token also uses a shared expert,
weighed by a sigmoid."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.moe import MoeSpec
from personae.engine.models.common import activation, decoder_config, experts, mixed_windows
from personae.kernels.moe import Routing


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Qwen2-MoE's `config.json`. `mlp_only_layers` and `decoder_sparse_step` say which layers are dense."""
    if fields.raw("sliding_window") == 0:
        fields = fields.within({}, {"sliding_window": None})
    windows, gate = mixed_windows(fields), activation(fields)
    count, top_k = experts(fields)
    shared = MlpSpec(
        fields.size("shared_expert_intermediate_size"), gate, path="mlp.shared_expert", key="shared_"
    )
    dense = MlpSpec(fields.size("intermediate_size"), gate)
    sparse = MoeSpec(
        count,
        fields.size("moe_intermediate_size"),
        Routing(top_k, fields.get("norm_topk_prob", False)),
        activation=gate,
        shared=shared,
        shared_gate="shared_expert_gate",
    )
    plain, step = fields.raw("mlp_only_layers") or [], fields.size("decoder_sparse_step", default=1)
    return decoder_config(
        architecture,
        fields,
        windows=windows,
        qkv_bias=fields.get("qkv_bias", True),
        mlps=[dense if layer in plain or (layer + 1) % step else sparse for layer in range(len(windows))],
    )
