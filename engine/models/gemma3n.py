"""Gemma 3n's decoder: Gemma 4's embeddings for each layer and shared keys, with several residual streams
(`engine/layers/altup.py`) and MLPs whose first layers use few inner vectors. The parts that read images and
sound are not used."""

from dataclasses import replace
from typing import Any

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.altup import AltUpSpec
from personae.engine.layers.attention import AttentionSpec
from personae.engine.layers.block import LayerSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.per_layer_embedding import PerLayerInputSpec
from personae.engine.models.common import (
    AFTER,
    SANDWICH,
    activation,
    decoder_config,
    ropes_by_window,
    text_fields,
    windows_by_type,
    with_shared_keys,
)
from personae.errors import as_json

DEFAULTS = {  # transformers' defaults; files of models with images may have only what differs
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
SPARSE_LAYERS = 10  # with 0.95, in models with more layers whose files do not say


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Gemma 3n's `config.json`."""
    images, fields = "text_config" in fields, text_fields(fields, "gemma3n_text", **DEFAULTS)
    layers = fields.size("num_hidden_layers")
    gate = activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    windowed = [(layer + 1) % 5 != 0 for layer in range(layers)]
    windows = windows_by_type(fields, fields.size("sliding_window", default=512), windowed)
    shared = fields.size("num_kv_shared_layers", default=15, zero=True)
    if shared >= layers:
        raise fields.error("num_kv_shared_layers", f"{shared} of {layers} layers leave none to share")
    bias = fields.get("attention_bias", False)
    config = decoder_config(
        architecture,
        fields,
        windows=windows,
        ropes=ropes_by_window(
            fields, windows, local="rope_local_base_freq", theta=1000000.0, local_theta=10000.0
        ),
        head_dim=256,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        attention_scale=1.0,
        mlps=[
            MlpSpec(size, gate, sparsity=sparsity, key=key)
            for size, key, sparsity in zip(*_sizes(fields, layers), _sparsity(fields, layers), strict=True)
        ],
        tie=True,
        images=images,
    )
    altup = _altup(fields, PerLayerInputSpec(fields.size("hidden_size_per_layer_input", default=256), gate))
    attentions = []
    for layer in config.layer_specs:
        assert isinstance(layer.attention, AttentionSpec)
        attentions.append(replace(layer.attention, value_norm=True))
    return replace(
        config,
        layer_specs=tuple(
            LayerSpec(attention, layer.mlp, altup)
            for attention, layer in zip(
                with_shared_keys(attentions, layers - shared, fields), config.layer_specs, strict=True
            )
        ),
        pre_norms=SANDWICH,
        post_norms=AFTER,
        embedding_scale=config.hidden_size**0.5,
        logits_softcap=fields.number("final_logit_softcapping", default=30.0),
        per_layer_embedding=(
            altup.per_layer.size,
            fields.size("vocab_size_per_layer_input", default=262144),
        ),
    )


def _altup(fields: Fields, per_layer: PerLayerInputSpec) -> AltUpSpec:
    streams = fields.size("altup_num_inputs", default=4)
    active = fields.size("altup_active_idx", default=0, zero=True)
    if active >= streams:
        raise fields.error("altup_active_idx", f"{active} is none of {streams} streams")
    fields.raw("altup_coef_clip")  # bounds weights in training
    return AltUpSpec(
        streams,
        active,
        fields.size("laurel_rank", default=64),
        per_layer,
        scaled=fields.get("altup_correct_scale", True),
    )


def _sizes(fields: Fields, layers: int) -> tuple[list[int], list[str]]:
    """The inner size of each MLP, and where its LoRA sites' names begin: sizes that differ from the first
    layer's have their own."""
    found = fields.raw("intermediate_size")
    sizes = found if isinstance(found, list) else [found] * layers
    if len(sizes) != layers or not all(type(size) is int and size > 0 for size in sizes):
        raise fields.error("intermediate_size", f"expected a size or {layers} sizes, found {as_json(found)}")
    return sizes, ["" if size == sizes[0] else f"of_{size}_" for size in sizes]


def _sparsity(fields: Fields, layers: int) -> list[float]:
    """The part of each MLP's inner vectors that is cut off."""
    name = "activation_sparsity_pattern"
    found: Any = fields.raw(name)
    if found is None:
        sparse = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
        return [0.95] * sparse + [0.0] * (layers - sparse)
    parts = found if isinstance(found, list) else [found] * layers
    if len(parts) != layers or not all(type(part) in (int, float) and 0 <= part < 1 for part in parts):
        raise fields.error(name, f"expected {layers} numbers from 0 to below 1, found {as_json(found)}")
    return [float(part) for part in parts]
