"""StableLM: Llama with LayerNorm, and with a part of each head rotated; in some models attention and MLP are
in parallel behind one norm."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import decoder_config, uniform_windows


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """StableLM's `config.json`."""
    if fields.get("qk_layernorm", False):
        raise fields.error("qk_layernorm", "is not supported")
    config = decoder_config(
        architecture,
        fields,
        windows=uniform_windows(fields, None),
        qkv_bias=fields.get("use_qkv_bias", False),
        eps="layer_norm_eps",
        default_eps=1e-5,
        partial_rope=0.25,
    )
    config = replace(config, norm="layer", norm_bias=True)
    if fields.get("use_parallel_residual", False):
        return replace(config, parallel=True, pre_norms=("input_layernorm", "input_layernorm"))
    return config
