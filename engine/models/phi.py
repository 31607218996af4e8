"""Phi 1, 1.5 and 2: LayerNorm, attention and MLP in parallel behind one norm, an MLP without a gate, biases
everywhere, and a part of each head rotated."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.mlp import MlpSpec
from personae.engine.models.common import activation, decoder_config, uniform_windows, with_attention


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Phi's `config.json`."""
    if fields.get("qk_layernorm", False):
        raise fields.error("qk_layernorm", "is not supported")
    gate = activation(fields, default="gelu_new", gated=False)
    mlp = MlpSpec(fields.size("intermediate_size"), gate, bias=True, gated=False, names=("fc1", "fc2"))
    windows = uniform_windows(fields, None)
    config = decoder_config(
        architecture,
        fields,
        windows=windows,
        qkv_bias=True,
        o_bias=True,
        mlps=[mlp] * len(windows),
        eps="layer_norm_eps",
        default_eps=1e-5,
        partial_rope=0.5,
    )
    return replace(
        with_attention(config, output="dense"),
        pre_norms=("input_layernorm", "input_layernorm"),
        parallel=True,
        norm="layer",
        norm_bias=True,
        final_norm="model.final_layernorm",
        output_bias=True,
    )
