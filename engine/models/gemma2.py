"""Gemma 2 and VaultGemma: soft caps on scores and logits, and a window in every second layer. Gemma 2 has
norms before and after each half of a layer, VaultGemma only before it."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import (
    AFTER,
    SANDWICH,
    activation,
    decoder_config,
    windows_by_type,
    with_attention,
)


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """The `config.json` of both. A cap of null means none; transformers' defaults are 50 and 30."""
    windowed = [layer % 2 == 0 for layer in range(fields.size("num_hidden_layers"))]
    if fields.raw("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", "is not supported")
    fields.raw("hidden_act")  # it reads hidden_activation
    bias = fields.get("attention_bias", False)
    config = decoder_config(
        architecture,
        fields,
        windows=windows_by_type(fields, fields.size("sliding_window", default=4096), windowed),
        head_dim=256,
        qkv_bias=bias,
        o_bias=bias,
        attention_scale=fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        gate=activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        tie=True,
    )
    config = replace(
        config,
        pre_norms=SANDWICH,
        post_norms=AFTER if architecture == "Gemma2ForCausalLM" else None,
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
        logits_softcap=_cap(fields, "final_logit_softcapping", 30.0),
    )
    return with_attention(config, softcap=_cap(fields, "attn_logit_softcapping", 50.0))


def _cap(fields: Fields, name: str, default: float) -> float | None:
    return fields.number(name, default=default) if name in fields or not fields.given(name) else None
