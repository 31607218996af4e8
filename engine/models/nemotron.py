"""Nemotron 4 and Minitron, Arcee's AFM and Jais 2: an MLP without a gate, with the square of ReLU. Nemotron
and Jais have LayerNorm; the stored weights of Nemotron's lack 1, and a part of each head is rotated."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.mlp import MlpSpec
from personae.engine.models.common import activation, decoder_config, uniform_windows


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """The `config.json` of the three. `attention_bias` covers q, k, v and o."""
    jais, nemotron = architecture == "Jais2ForCausalLM", architecture == "NemotronForCausalLM"
    bias, windows = fields.get("attention_bias", jais), uniform_windows(fields, None)
    gate = activation(fields, default="relu2", gated=False)
    mlp = MlpSpec(fields.size("intermediate_size"), gate, fields.get("mlp_bias", jais), gated=False)
    config = decoder_config(
        architecture,
        fields,
        windows=windows,
        head_dim=128 if jais or nemotron else None,
        qkv_bias=bias,
        o_bias=bias,
        mlps=[mlp] * len(windows),
        eps="norm_eps" if nemotron else "layer_norm_eps" if jais else "rms_norm_eps",
        default_eps=1e-5,
        partial_rope=0.5 if nemotron else None,
    )
    if not (jais or nemotron):
        return config
    return replace(config, norm="layer", norm_bias=True, norm_offset=1.0 if nemotron else 0.0)
