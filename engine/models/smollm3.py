"""SmolLM3: Llama in which some layers have no rotary embedding, by default every fourth."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import decoder_config, mixed_windows
from personae.errors import as_json


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """SmolLM3's `config.json`. `no_rope_layers` has 1 for a layer with a rotary embedding, else 0."""
    layers, every = fields.size("num_hidden_layers"), fields.size("no_rope_layer_interval", default=4)
    rotated = fields.raw("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or not {*rotated} <= {0, 1}:
        raise fields.error("no_rope_layers", f"expected {layers} times 0 or 1, found {as_json(rotated)}")
    rotated = [bool(flag) for flag in rotated[:layers]]
    bias = fields.get("attention_bias", False)
    return decoder_config(
        architecture,
        fields,
        windows=mixed_windows(fields, windowed=[not flag for flag in rotated]),
        rotated=rotated,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.get("mlp_bias", False),
        default_theta=2000000.0,
        tie=True,
    )
