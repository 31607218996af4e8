"""Translates GGUF's metadata into the fields of `config.json`, which the model families read."""

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any

from gguf import PoolingType

from personae.engine.checkpoints.gguf.architectures import LARGEST_HEAD, SCALES, Architecture, architecture_of
from personae.engine.checkpoints.gguf.header import TensorInfo
from personae.engine.checkpoints.gguf.metadata import Metadata
from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.attention import AttentionSpec
from personae.engine.layers.block import BlockSpec, LayerSpec
from personae.engine.layers.delta_net import DeltaNetSpec
from personae.engine.layers.latent_attention import LatentAttentionSpec
from personae.engine.layers.mamba import MambaSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.parallel import ParallelSpec, side_by_side
from personae.engine.layers.rotary import RopeConfig
from personae.engine.layers.short_convolution import ShortConvolutionSpec
from personae.engine.models import family
from personae.errors import ModelLoadError, as_json

LONGEST = 2**24  # the longest context, in tokens, that is accepted
UNADAPTABLE = (
    "the base is a GGUF file of a family whose scales are inside its weights there, so adapters of the model "
    "would be scaled otherwise; serve the base from its folder"
)
# Fields that change the arithmetic, and that no supported architecture needs.
UNSERVED = (
    "expert_count",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.relative_buckets_count",
    "use_parallel_residual",
    "ssm.state_size",
)
# Fields that llama.cpp's converter writes, and that change nothing in these architectures.
MEANINGLESS = frozenset(
    [
        "attention.layer_norm_epsilon",  # where the norms are RMS norms
        "attention.layer_norm_rms_epsilon",  # where they are not
        "expert_used_count",  # there are no experts
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "vocab_size",  # the embedding has the rows
    ]
)
STATE_SIZES = frozenset(
    f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
)
"""What the converter also writes for Granite 4 without states."""
YARN = {  # below `rope.scaling`, by config.json's names
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_log_multiplier": "mscale_all_dim",
}


def read_gguf_config(
    metadata: Metadata,
    tensors: Mapping[str, TensorInfo],
    factors: Callable[[str], tuple[float, ...]],
) -> ModelConfig:
    """The shape of a file's model. `factors` reads one of the tensors that scale the rotary embedding.

    Raises ModelLoadError, which names the field.
    """
    architecture = architecture_of(metadata)
    prefix = metadata.text("general.architecture")
    values = _common(metadata, prefix, architecture, tensors)
    if "rope_factors_long.weight" in tensors:
        values["rope_scaling"] = {
            **values.pop("rope_scaling", {}),
            "rope_type": "longrope",
            "long_factor": list(factors("rope_factors_long.weight")),
            "short_factor": list(factors("rope_factors_short.weight")),
        }
    elif metadata.text(f"{prefix}.rope.scaling.type", default="none") == "longrope":
        raise ModelLoadError(f"{metadata.where} has no rope_factors_long.weight, which longrope needs")
    stretched = factors("rope_freqs.weight") if "rope_freqs.weight" in tensors else ()
    if architecture.proportional:
        values["rotated_share"] = sum(factor == 1 for factor in stretched) / max(1, len(stretched)) or 1.0
    name = architecture.name
    if architecture.translate is not None:
        architecture.translate(metadata, prefix, values)
        name = values.pop("architecture", name)
    translate = family(name)
    assert translate is not None
    parts = {key.split(".", 2)[2] for key in tensors if key.startswith("blk.") and key.count(".") > 1}
    config = replace(
        translate(name, Fields(values, metadata.where)),
        norm_offset=0.0,  # GGUF adds the offset to the stored norms
        unadaptable=UNADAPTABLE if architecture.scaled else None,
    ).with_layers(partial(_with_biases, parts))
    if stretched and not architecture.proportional:
        config = _with_factors(metadata, config, stretched)
    meaningless = MEANINGLESS if _has_states(config) else MEANINGLESS | STATE_SIZES
    metadata.refuse_unread(f"{prefix}.", meaningless)
    return config


def _has_states(config: ModelConfig) -> bool:
    return any(
        isinstance(block, MambaSpec | DeltaNetSpec)
        for layer in config.layer_specs
        for block in side_by_side(layer.attention)
    )


def _with_biases(parts: Set[str], layer: LayerSpec) -> LayerSpec:
    """The layer with the biases that the file has, of whose tensors `parts` are the names in a layer. Experts
    have them or not by their family."""
    mlp = layer.mlp
    if isinstance(mlp, MlpSpec):
        mlp = replace(mlp, bias="ffn_up.bias" in parts)
    return replace(layer, attention=_biased(parts, layer.attention), mlp=mlp)


def _biased(parts: Set[str], block: BlockSpec) -> BlockSpec:
    if isinstance(block, ParallelSpec):
        return replace(block, first=_biased(parts, block.first), second=_biased(parts, block.second))
    if isinstance(block, AttentionSpec):
        merged = not parts.isdisjoint(("attn_q.bias", "attn_qkv.bias"))
        return replace(block, qkv_bias=merged, o_bias="attn_output.bias" in parts)
    if isinstance(block, LatentAttentionSpec):
        return replace(block, bias="attn_kv_a_mqa.bias" in parts)
    if isinstance(block, MambaSpec):
        return replace(block, bias="ssm_in.bias" in parts, conv_bias="ssm_conv1d.bias" in parts)
    if isinstance(block, ShortConvolutionSpec):
        return replace(block, bias="shortconv.conv.bias" in parts)
    return block


def _attention(layer: LayerSpec) -> AttentionSpec:
    """The layer's attention. Other blocks in its place are not supported in GGUF."""
    assert isinstance(layer.attention, AttentionSpec)
    return layer.attention


def _common(
    metadata: Metadata, prefix: str, architecture: Architecture, tensors: Mapping[str, TensorInfo]
) -> dict[str, Any]:
    for field in UNSERVED:
        key = f"{prefix}.{field}"
        if field not in architecture.reads and metadata.raw(key) not in (None, 0, False):
            raise metadata.error(key, "is not supported")
    for field in SCALES:
        if field not in architecture.reads and f"{prefix}.{field}" in metadata:
            raise metadata.error(f"{prefix}.{field}", "is supported in Granite only")
    if not metadata.flag(f"{prefix}.attention.causal", default=True):
        raise metadata.error(f"{prefix}.attention.causal", "attention in both directions is not supported")
    _check_pooling(metadata, f"{prefix}.pooling_type")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{metadata.where} has no matrix token_embd.weight")
    layers = metadata.integer(f"{prefix}.block_count")
    if layers > len(tensors):
        raise metadata.error(f"{prefix}.block_count", f"{layers} layers cannot have {len(tensors)} tensors")
    longest = metadata.integer(f"{prefix}.context_length")
    if longest > LONGEST:
        raise metadata.error(f"{prefix}.context_length", f"{longest} is over {LONGEST}")
    heads, hidden = (
        metadata.integer(f"{prefix}.attention.head_count"),
        metadata.integer(f"{prefix}.embedding_length"),
    )
    if hidden != embedding.shape[1]:
        raise metadata.error(
            f"{prefix}.embedding_length", f"is {hidden}, but token_embd.weight has {embedding.shape[1]}"
        )
    values: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _inner_size(metadata, f"{prefix}.feed_forward_length", architecture, layers),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(metadata, prefix, architecture, heads, layers),
        "max_position_embeddings": longest,
        architecture.eps: metadata.number(f"{prefix}.attention.{architecture.norm}_epsilon"),
        "rope_theta": metadata.number(f"{prefix}.rope.freq_base", default=10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in tensors,
    }
    if (laurel := tensors.get("blk.0.laurel_l.weight")) is not None:
        values["laurel_rank"] = laurel.shape[0]
    head = 0 if architecture.latent else _head_size(metadata, prefix, values, partial=architecture.partial)
    _rope(metadata, prefix, values, head)
    return values


def _inner_size(metadata: Metadata, key: str, architecture: Architecture, layers: int) -> int:
    """The size of an MLP's inner vectors. Layers of a mixed architecture may have none: 0."""
    if architecture.uneven:
        return metadata.per_layer(key, layers)[0]
    if architecture.mixed and not isinstance(metadata.raw(key), int):
        sizes = {*metadata.integers(key, default=[])} - {0}
        if len(sizes) != 1:
            raise metadata.error(key, "must be one number, or 0, for every layer")
        return sizes.pop()
    return metadata.integer(key, default=0 if "expert_count" in architecture.reads else None)


def _kv_heads(metadata: Metadata, prefix: str, architecture: Architecture, heads: int, layers: int) -> int:
    """The heads of keys and values, of all layers that have some."""
    key = f"{prefix}.attention.head_count_kv"
    if architecture.uneven:
        return metadata.per_layer(key, layers, default=heads)[0]
    if not architecture.mixed:
        return metadata.integer(key, default=heads)
    found = {*metadata.integers(key, default=[heads])} - {0}
    if len(found) != 1:
        raise metadata.error(key, "must be one number, or 0, for every layer")
    return found.pop()


def _check_pooling(metadata: Metadata, key: str) -> None:
    """Raises ModelLoadError unless vectors are the mean of the hidden states or the last one, which requests
    choose."""
    kind = metadata.integer(key, default=0)
    if kind not in (PoolingType.NONE, PoolingType.MEAN, PoolingType.LAST):
        raise metadata.error(key, f"{kind} is not supported, only mean (1) and last (3)")


def _head_size(metadata: Metadata, prefix: str, values: dict[str, Any], *, partial: bool) -> int:
    """The size of a head. Adds it, and its rotated part, to `values`."""
    heads = values["num_attention_heads"]
    if not heads:
        raise metadata.error(f"{prefix}.attention.head_count", "must be at least 1")
    key, value = f"{prefix}.attention.key_length", f"{prefix}.attention.value_length"
    head = metadata.integer(key, default=values["hidden_size"] // heads)
    if not 0 < head <= LARGEST_HEAD or heads > LARGEST_HEAD:
        raise metadata.error(key, f"{heads} heads of {head} dimensions are not plausible sizes")
    if metadata.integer(value, default=head) != head:
        raise metadata.error(value, f"differs from {key}, which is not supported")
    values["head_dim"] = head
    turned = metadata.integer(f"{prefix}.rope.dimension_count", default=head)
    if turned != head:
        if not partial:
            raise metadata.error(f"{prefix}.rope.dimension_count", f"{turned} of {head} is not supported")
        values["partial_rotary_factor"] = turned / head
    return head


def _rope(metadata: Metadata, prefix: str, values: dict[str, Any], head: int) -> None:
    """Adds the scaling of the rotary embedding to `values`."""
    scaling = f"{prefix}.rope.scaling"
    old, new = f"{prefix}.rope.scale_linear", f"{scaling}.factor"
    factor = new if new in metadata else old
    stretches = metadata.raw(factor) not in (None, 0, 1)
    # llama.cpp's own default.
    kind = metadata.text(f"{scaling}.type", default="linear" if stretches else "none")
    original = metadata.integer(f"{scaling}.original_context_length", default=0)
    # The first is today's name for config.json's attention_factor.
    magnitudes = [f"{scaling}.{name}" for name in ("yarn_attn_factor", "attn_factor")]
    magnitude = next((metadata.number(key) for key in magnitudes if key in metadata), None)
    yarn = {
        name: metadata.number(f"{scaling}.{key}")
        for key, name in YARN.items()
        if f"{scaling}.{key}" in metadata
    }
    if metadata.raw(f"{scaling}.yarn_ext_factor") not in (None, -1.0, 1.0):
        raise metadata.error(f"{scaling}.yarn_ext_factor", "is not supported, only 1")
    if kind == "linear" and stretches:
        values["rope_scaling"] = {"rope_type": "linear", "factor": metadata.number(factor)}
    elif kind == "yarn":
        values["rope_scaling"] = {"rope_type": "yarn", "factor": metadata.number(factor), **yarn}
        if "mscale_all_dim" in yarn:
            values["rope_scaling"]["mscale"] = 1.0
    elif kind not in ("none", "linear", "longrope"):
        raise metadata.error(
            f"{scaling}.type", f"{as_json(kind)} is not supported, only none, linear, yarn and longrope"
        )
    if kind in ("yarn", "longrope") or prefix == "phi3":
        if original:
            values["original_max_position_embeddings"] = original
        if magnitude is not None:
            values.setdefault("rope_scaling", {})["attention_factor"] = magnitude
    elif magnitude not in (None, 1.0):
        raise metadata.error(magnitudes[1], f"is supported with yarn and longrope only, not with {kind}")


def _with_factors(metadata: Metadata, config: ModelConfig, factors: tuple[float, ...]) -> ModelConfig:
    """Llama 3's rope scaling: each pair's frequency is divided by its own factor."""
    pairs = _attention(config.layer_specs[0]).head_dim // 2
    if len(factors) != pairs:
        raise ModelLoadError(
            f"{metadata.where}: rope_freqs.weight has {len(factors)} factors for {pairs} pairs"
        )

    def stretched(rope: RopeConfig | None) -> RopeConfig | None:
        if rope is None:
            return None
        if rope.type != "default":
            raise ModelLoadError(
                f"{metadata.where}: rope_freqs.weight and rope.scaling are not supported together"
            )
        return replace(
            rope,
            type="longrope",
            original_max_position=config.max_position,
            attention_factor=1.0,
            short_factors=factors,
            long_factors=factors,
        )

    def layer(spec: LayerSpec) -> LayerSpec:
        attention = _attention(spec)
        return replace(spec, attention=replace(attention, rope=stretched(attention.rope)))

    return config.with_layers(layer)
