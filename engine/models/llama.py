"""Llama 2 and 3, and other models that call themselves `LlamaForCausalLM` (SmolLM2, TinyLlama, ...)."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import decoder_config, uniform_windows


def translate(architecture: str, fields: Fields, *, attention_scale: float | None = None) -> ModelConfig:
    """Llama's `config.json`. Full attention; `attention_bias` covers q, k, v and o."""
    bias = fields.get("attention_bias", False)
    return decoder_config(
        architecture,
        fields,
        windows=uniform_windows(fields, None),
        qkv_bias=bias,
        o_bias=bias,
        attention_scale=attention_scale,
        mlp_bias=fields.get("mlp_bias", False),
        default_eps=1e-5 if architecture == "IQuestCoderForCausalLM" else 1e-6,
    )
