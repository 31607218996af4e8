"""Cohere's Command R and Command R7B: LayerNorm without biases, attention and MLP in parallel behind one
norm, an interleaved rotary embedding, and a scale on the logits. In Command R7B three of four layers have a
window, and only those are rotated."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import decoder_config, uniform_windows, windows_by_type
from personae.errors import as_json

NORM = ("input_layernorm", "input_layernorm")

SERVED = {
    **dict.fromkeys(("use_embedding_sharing", "use_gated_activation", "use_parallel_block"), True),
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
    "rotary_pct": 1.0,
}
"""What the makers' files say about the only form that there is."""
MEANINGLESS = ("use_parallel_embedding", "layer_switch")


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """The `config.json` of both. `attention_bias` covers q, k, v and o."""
    if fields.get("use_qk_norm", False):
        raise fields.error("use_qk_norm", "norms of q and k with a weight for each head are not supported")
    for name, served in SERVED.items():
        if fields.raw(name) not in (None, served):
            raise fields.error(name, f"only {as_json(served)} is supported")
    for name in MEANINGLESS:
        fields.raw(name)
    bias = fields.get("attention_bias", False)
    second = architecture == "Cohere2ForCausalLM"
    if second:
        layers = fields.size("num_hidden_layers")
        every = fields.size(
            "sliding_window_pattern", default=fields.size("_sliding_window_pattern", default=4)
        )
        windowed = [(layer + 1) % every != 0 for layer in range(layers)]
        windows = windows_by_type(fields, fields.size("sliding_window", default=4096), windowed)
        rotated = [window is not None for window in windows]
    else:
        windows = uniform_windows(fields, None)
        rotated = [True] * len(windows)
    config = decoder_config(
        architecture,
        fields,
        windows=windows,
        rotated=rotated,
        head_dim=128 if second else None,
        qkv_bias=bias,
        o_bias=bias,
        eps="layer_norm_eps",
        default_eps=1e-5,
        default_theta=10000.0 if second else 500000.0,
        interleaved=True,
        tie=True,
    )
    return replace(
        config,
        pre_norms=NORM,
        parallel=True,
        norm="layer",
        logits_scale=fields.number("logit_scale", default=0.0625),
    )
