"""Bamba: Mamba-2 in all layers but a few, which have attention with a half of each head rotated."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.mlp import MlpSpec
from personae.engine.models.common import activation, decoder_config
from personae.engine.models.granitemoe import mamba_spec


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Bamba's `config.json`."""
    layers, bias = fields.size("num_hidden_layers"), fields.get("attention_bias", False)
    attentions = fields.raw("attn_layer_indices") or []
    if not isinstance(attentions, list) or not {*attentions} <= {*range(layers)}:
        raise fields.error("attn_layer_indices", f"expected numbers of the {layers} layers")
    for name in ("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"):
        fields.raw(name)
    mlp = MlpSpec(
        fields.size("intermediate_size"),
        activation(fields),
        bias=fields.get("mlp_bias", False),
        path="feed_forward",
    )
    config = decoder_config(
        architecture,
        fields,
        windows=(None,) * layers,
        qkv_bias=bias,
        o_bias=bias,
        mlps=[mlp] * layers,
        default_eps=1e-5,
        partial_rope=0.5,
    )
    mamba = mamba_spec(fields, config)
    return replace(
        config,
        layer_specs=tuple(
            layer if index in attentions else replace(layer, attention=mamba)
            for index, layer in enumerate(config.layer_specs)
        ),
        pre_norms=("input_layernorm", "pre_ff_layernorm"),
        final_norm="model.final_layernorm",
    )
