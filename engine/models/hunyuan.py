"""Hunyuan's first models, dense and with experts: q and k are normalised per head, after the rotary
embedding."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.block import BlockSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.moe import MoeSpec
from personae.engine.layers.rotary import RopeConfig
from personae.engine.models.common import (
    activation,
    decoder_config,
    rope_config,
    rope_section,
    uniform_windows,
    with_attention,
)
from personae.errors import as_json
from personae.kernels.moe import Routing


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Hunyuan's `config.json`. `attention_bias` covers q, k, v and o."""
    bias, windows = fields.get("attention_bias", False), uniform_windows(fields, None)
    fields.raw("eod_token_id")
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    dim = fields.size("head_dim", default=max(1, hidden // heads))
    config = decoder_config(
        architecture,
        fields,
        windows=windows,
        ropes=(_rope(fields, dim),) * len(windows),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        mlps=_experts(fields, len(windows)) if architecture == "HunYuanMoEV1ForCausalLM" else None,
        default_eps=1e-5,
    )
    return with_attention(config, normed_after_rope=True, norms=("query_layernorm", "key_layernorm"))


def _experts(fields: Fields, layers: int) -> list[BlockSpec]:
    """The experts of each layer, and an MLP for every token. Files may have a number for each layer."""
    size, gate = fields.size("intermediate_size"), activation(fields)
    name = "moe_topk" if "moe_topk" in fields else "num_experts_per_tok"
    counts, chosen = (_of_layers(fields, key, layers) for key in ("num_experts", name))
    for count, top_k in zip(counts, chosen, strict=True):
        if top_k > count:
            raise fields.error(name, f"{top_k} is more than the {count} experts")
    return [
        MoeSpec(
            count,
            size,
            Routing(top_k, renormalize=True),
            activation=gate,
            router="gate.wg",
            shared=MlpSpec(size, gate, path="mlp.shared_mlp", key="shared_"),
        )
        for count, top_k in zip(counts, chosen, strict=True)
    ]


def _of_layers(fields: Fields, name: str, layers: int) -> list[int]:
    """A positive number for each layer, of a list or of one for all."""
    found = fields.raw(name)
    numbers = found if isinstance(found, list) else [fields.size(name, default=1)] * layers
    if len(numbers) != layers or not all(type(number) is int and number > 0 for number in numbers):
        raise fields.error(name, f"expected {layers} numbers from 1 on, found {as_json(found)}")
    return numbers


def _rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Type `dynamic` with `alpha` is a larger base for all lengths. The other keys of that type change
    nothing."""
    rope, plain = rope_section(fields), rope_config(fields, dynamic=True)
    if "alpha" not in rope:
        return plain
    for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        rope.raw(name)
    return replace(plain, theta=plain.theta * rope.number("alpha") ** (head_dim / (head_dim - 2)))
