"""Reads the `config.json` of an EAGLE-3 head, strictly.

Two formats are in use: the flat one of the EAGLE authors, SpecForge and TensorRT-LLM, and the one of the
`speculators` library, which has the decoder layer's fields in a section. vLLM reads both.
"""

from dataclasses import dataclass
from pathlib import Path

from personae.engine.fields import Fields, read_fields
from personae.engine.layers.attention import AttentionSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.models.common import activation, rope_config
from personae.errors import as_json

CONFIG = "config.json"
_SECTIONED, _LAYER = "speculators_model_type", "transformer_layer_config"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_CHANGING = ("norm_before_fc", "norm_output", "use_input_layernorm_in_first_layer", "use_mtp_layernorm")


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The shape of an EAGLE-3 head.

    `vocab_size`: of the model that it guesses for; it guesses `draft_vocab_size` of these tokens.
    `target_hidden_size`: of that model. `layers`: it reads the residual stream as it enters these layers of
    the model, None for vLLM's default. `norm_before_residual`: the residual stream begins with the normalised
    hidden state.
    """

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    max_position: int
    eps: float
    attention: AttentionSpec
    mlp: MlpSpec
    fc_bias: bool
    norm_before_residual: bool
    layers: tuple[int, ...] | None

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The layers that it reads of a model with `count` layers."""
        return (2, count // 2, count - 3) if self.layers is None else self.layers


def is_eagle3(fields: Fields) -> bool:
    """Whether the fields are those of an EAGLE-3 head, as far as they can be told from a model's."""
    return _SECTIONED in fields or "draft_vocab_size" in fields


def read_eagle3_config(path: Path) -> Eagle3Config:
    """Read the `config.json` of a head's folder.

    Raises:
        ModelLoadError: it is no EAGLE-3 head, or a field is missing, malformed or not supported.
    """
    fields = read_fields(path / CONFIG)
    layer = fields
    if _SECTIONED in fields:
        kind = fields.raw(_SECTIONED)
        if kind != "eagle3":
            raise fields.error(_SECTIONED, f"{as_json(kind)} is not supported, only eagle3")
        section = fields.section(_LAYER)
        if section is None:
            raise fields.error(_LAYER, "is missing")
        layer = section
    elif "eagle3" not in architecture(fields).lower() and "draft_vocab_size" not in fields:
        raise fields.error(
            "architectures",
            f"{as_json(architecture(fields))} is not supported; of trained heads, EAGLE-3 and MiMo's MTP "
            "layer are",
        )
    for name in _CHANGING:
        if fields.get(name, False):
            raise fields.error(name, "is not supported")
    if layer.size("num_hidden_layers", default=1) != 1:
        raise layer.error("num_hidden_layers", "heads of one layer are supported")
    hidden = layer.size("hidden_size")
    vocab = layer.size("vocab_size")
    return Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=fields.size("target_hidden_size", default=hidden),
        vocab_size=vocab,
        draft_vocab_size=fields.size("draft_vocab_size", default=vocab),
        max_position=layer.size("max_position_embeddings"),
        eps=layer.number("rms_norm_eps", default=1e-6),
        attention=_attention(layer, hidden),
        mlp=MlpSpec(layer.size("intermediate_size"), activation(layer), layer.get("mlp_bias", False)),
        fc_bias=fields.get("bias", False),
        norm_before_residual=fields.get("norm_before_residual", _SECTIONED in fields),
        layers=_layers(fields),
    )


def architecture(fields: Fields) -> str:
    """The architecture's name; empty without one."""
    names = fields.raw("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _attention(fields: Fields, hidden: int) -> AttentionSpec:
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{kv_heads} does not divide {heads} attention heads")
    size = fields.size("head_dim", default=max(1, hidden // heads))
    if size % 2:
        raise fields.error("head_dim", f"{size} is odd; rotary embeddings need pairs")
    bias = fields.get("attention_bias", False)
    return AttentionSpec(
        heads, kv_heads, size, rope=rope_config(fields), qkv_bias=bias, o_bias=bias, inputs=2 * hidden
    )


def _layers(fields: Fields) -> tuple[int, ...] | None:
    """The layers that the head names, at the top or in the section of the EAGLE library."""
    place = fields if _LAYERS in fields else fields.section("eagle_config") or fields
    found = place.raw(_LAYERS)
    if found is None:
        return None
    whole = isinstance(found, list) and all(type(layer) is int and layer >= 0 for layer in found)
    if not whole or not found or sorted(set(found)) != found:
        raise place.error(_LAYERS, f"expected layers in ascending order, found {as_json(found)}")
    return tuple(found)
