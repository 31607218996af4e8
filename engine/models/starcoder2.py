"""StarCoder 2: LayerNorm, an MLP without a gate, and biases everywhere."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.mlp import MlpSpec
from personae.engine.models.common import activation, decoder_config, uniform_windows


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """StarCoder 2's `config.json`. `use_bias` covers all linear modules of a layer."""
    window = fields.size("sliding_window") if "sliding_window" in fields else None
    bias, windows = fields.get("use_bias", True), uniform_windows(fields, window)
    gate = activation(fields, default="gelu_pytorch_tanh", gated=False)
    mlp = MlpSpec(fields.size("intermediate_size"), gate, bias, gated=False, names=("c_fc", "c_proj"))
    for name in ("activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        fields.raw(name)
    for name in ("scale_attn_weights", "layer_norm_epsilon", "norm_type", "mlp_type"):
        fields.raw(name)  # of the format before
    config = decoder_config(
        architecture,
        fields,
        windows=windows,
        qkv_bias=bias,
        o_bias=bias,
        mlps=[mlp] * len(windows),
        eps="norm_epsilon",
        default_eps=1e-5,
        tie=True,
    )
    return replace(config, norm="layer", norm_bias=True)
