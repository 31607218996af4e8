"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is one block, Mamba-2, attention without a
rotary embedding, an MLP without a gate, or experts that are such MLPs. Layers for further tokens are not
used."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.block import BlockSpec, LayerSpec, NoBlockSpec
from personae.engine.layers.latent_experts import LatentExpertsSpec
from personae.engine.layers.mamba import MambaSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.moe import MoeSpec
from personae.engine.models.common import activation, decoder_config, grouped_experts, with_attention
from personae.engine.models.granitemoe import limits
from personae.errors import as_json

PATH = "mixer"
KINDS = {
    "M": "mamba",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "*": "attention",
    "attention": "attention",
    "full_attention": "attention",
    "-": "mlp",
    "mlp": "mlp",
    "E": "moe",
    "moe": "moe",
}
"""The kinds of layers by the files' names: a letter of `hybrid_override_pattern`, or a name in a list."""
RENAMED = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
}
MEANINGLESS = (  # transformers reads others, or none: training, kernels, and layers for further tokens
    *(
        "hybrid_override_pattern",
        "layers_block_type",
        "layer_types",
        "num_hidden_layers",
        "expand",
        "chunk_size",
    ),
    *("mamba_expand", "mamba_chunk_size", "mamba_dt_max", "mamba_dt_min", "mamba_dt_init_floor"),
    *(
        "time_step_max",
        "time_step_min",
        "time_step_floor",
        "mamba_proj_bias",
        "hidden_act",
        "mamba_hidden_act",
    ),
    *(
        "mtp_layers_block_type",
        "mtp_hybrid_override_pattern",
        "moe_shared_expert_overlap",
        "residual_in_fp32",
    ),
    *("rescale_prenorm_residual", "use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep"),
)
OF_KIND = {  # files have them without such layers, too
    "mlp": ("intermediate_size",),
    "moe": (
        *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size", "n_group"),
        *("moe_shared_expert_intermediate_size", "n_shared_experts", "norm_topk_prob", "topk_group"),
        "routed_scaling_factor",
    ),
}


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Nemotron-H's `config.json`."""
    kinds = _kinds(fields)
    if "sliding_window" in fields:
        raise fields.error("sliding_window", "is not supported")
    if fields.get("attention_bias", False):
        raise fields.error("attention_bias", "biases of attention are not supported")
    if fields.get("mamba_hidden_act", "silu") not in ("silu", "swish"):
        raise fields.error("mamba_hidden_act", 'only "silu" is supported')
    for name in (*MEANINGLESS, *(name for kind in OF_KIND if kind not in kinds for name in OF_KIND[kind])):
        fields.raw(name)
    given = {new: fields.raw(old) for old, new in RENAMED.items() if old in fields}
    fields = fields.within({}, {**given, "num_hidden_layers": len(kinds)})
    config = decoder_config(
        architecture,
        fields,
        windows=(None,) * len(kinds),
        rotated=[False] * len(kinds),
        head_dim=128,
        mlps=[NoBlockSpec()] * len(kinds),
        eps="layer_norm_epsilon",
        default_eps=1e-5,
    )
    attention = with_attention(config, path=PATH).layer_specs[0].attention
    blocks: dict[str, BlockSpec] = {"attention": attention}
    for kind, build in (("mamba", _mamba), ("mlp", _mlp), ("moe", _experts)):
        if kind in kinds:
            blocks[kind] = build(fields, config)
    absent = NoBlockSpec()
    return replace(
        config,
        layer_specs=tuple(
            LayerSpec(absent, blocks[kind]) if kind in ("mlp", "moe") else LayerSpec(blocks[kind], absent)
            for kind in kinds
        ),
        pre_norms=("norm", "norm"),
        final_norm="model.norm_f",
        mtp_layers=fields.size("num_nextn_predict_layers", default=0, zero=True),
    )


def _kinds(fields: Fields) -> list[str]:
    """What each layer is."""
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    name = next((name for name in names if name in fields), names[0])
    given = fields.raw(name)
    if given is None:
        raise fields.error(name, "is missing")
    if not isinstance(given, list | str) or not given or any(each not in [*KINDS] for each in given):
        raise fields.error(
            name, f"expected the kind of each layer, of {', '.join(KINDS)}; found {as_json(given)}"
        )
    return [KINDS[each] for each in given]


def _mamba(fields: Fields, config: ModelConfig) -> MambaSpec:
    heads, groups = fields.size("mamba_num_heads", default=128), fields.size("n_groups", default=8)
    if heads % groups:
        raise fields.error("n_groups", f"{groups} groups do not divide {heads} heads")
    return MambaSpec(
        heads,
        fields.size("mamba_head_dim", default=64),
        fields.size("ssm_state_size", default=128),
        groups,
        fields.size("conv_kernel", default=4),
        fields.get("use_conv_bias", True),
        fields.get("use_bias", False),
        limits(fields, "time_step_limit"),  # transformers has time_step_min, and that only for prompts
        config.eps,
        path=PATH,
    )


def _mlp(fields: Fields, config: ModelConfig) -> MlpSpec:
    return MlpSpec(
        fields.size("intermediate_size"),
        activation(fields, "mlp_hidden_act", "relu2", gated=False),
        fields.get("mlp_bias", False),
        gated=False,
        path=PATH,
    )


def _experts(fields: Fields, config: ModelConfig) -> MoeSpec | LatentExpertsSpec:
    """Those of Nemotron 3 Super read a narrower vector."""
    moe = grouped_experts(fields.within({}, {"hidden_act": "silu"}))
    act = activation(fields, "mlp_hidden_act", "relu2", gated=False)
    shared = MlpSpec(
        fields.size("moe_shared_expert_intermediate_size"),
        act,
        fields.get("mlp_bias", False),
        gated=False,
        path=f"{PATH}.shared_experts",
        key="shared_",
    )
    if "moe_latent_size" not in fields:
        return replace(moe, activation=act, gated=False, path=PATH, shared=shared)
    sparse = replace(moe, activation=act, gated=False, path=PATH, shared=None)
    return LatentExpertsSpec(sparse, shared, fields.size("moe_latent_size"), shared.bias)
