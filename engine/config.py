"""What a model folder says about itself: `config.json` and `generation_config.json`, read strictly.

`ModelConfig` holds exactly what the decoder needs, in one spelling, whatever the family and the age of the
file. A field that would change the model's arithmetic and is not understood stops the load with its name: a
model that loads is a model that is computed as its makers meant it.

The fields are those of Hugging Face transformers, versions 4 (`rope_theta`, `rope_scaling`, `torch_dtype`)
and 5 (`rope_parameters`, `dtype`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from personae.engine.layers.block import KVSpec, LayerSpec
from personae.engine.models import FAMILIES, MODEL_TYPES, family
from personae.errors import ModelLoadError
from personae.lora.sites import LoraSite

Scalar = TypeVar("Scalar", int, float, bool, str)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer.

    `max_position` is the longest context in tokens, rope stretching included. `layer_specs`: what each layer
    is made of. `tie` says that the output matrix is the embedding. `pre_norms`: what each half of a layer
    reads is normalised; `post_norms`: what it puts out, before it is added. `norm_offset` is added to norms'
    weights as they are stored. The scales are those of what the embedding, and each half of a layer, add to
    the residual stream, and of the logits. `images`: the checkpoint has a part for images as well. `dtype` is
    the dtype the checkpoint was made in, None where the file does not say.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int
    eps: float
    tie: bool
    layer_specs: tuple[LayerSpec, ...]
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    images: bool = False
    dtype: str | None = None

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.layer_specs)

    @property
    def lora_sites(self) -> dict[str, LoraSite]:
        """The linear modules that adapters may change, by their short names: those that all layers have."""
        first, *others = (layer.lora_sites(self.hidden_size) for layer in self.layer_specs)
        return {key: site for key, site in first.items() if all(own.get(key) == site for own in others)}

    @property
    def kv_specs(self) -> tuple[KVSpec | None, ...]:
        """What each layer keeps of every token."""
        return tuple(layer.attention.kv for layer in self.layer_specs)

    def with_layers(self, change: Callable[[LayerSpec], LayerSpec]) -> "ModelConfig":
        """The same with other layers."""
        return replace(self, layer_specs=tuple(map(change, self.layer_specs)))


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's makers recommend for sampling, None where silent. `eos` ids end an answer."""

    eos: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class Fields:
    """The fields of one JSON object, each read with its type; every error names the file and the field."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def error(self, name: str, why: str) -> ModelLoadError:
        """An error about one field, to be raised by the caller."""
        return ModelLoadError(f"{self.where}: {name}: {why}")

    def raw(self, name: str) -> Any:
        """The field as it is, None where absent."""
        return self._values.get(name)

    def get(self, name: str, default: Scalar) -> Scalar:
        """The field, of the default's type; an integer is taken where a float is wanted."""
        value = self._values.get(name)
        if value is None:
            return default
        if type(default) is float and type(value) is int:
            value = float(value)
        if type(value) is not type(default):
            raise self.error(name, f"expected {type(default).__name__}, found {value!r}")
        return value

    def number(
        self, name: str, *, default: float | None = None, zero: bool = False, high: float = float("inf")
    ) -> float:
        """A finite float over 0 (or 0, with `zero`), at most `high`; must be there without a default."""
        if default is None and name not in self:
            raise self.error(name, "is missing")
        value = self.get(name, default if default is not None else 0.0)
        if not 0 <= value <= high or value == float("inf") or (value == 0 and not zero):
            raise self.error(
                name, f"must be {'at least' if zero else 'over'} 0, at most {high:g}, found {value!r}"
            )
        return value

    def optional_number(self, name: str, *, zero: bool = False, high: float = float("inf")) -> float | None:
        """As `number`, or None where absent."""
        return self.number(name, zero=zero, high=high) if name in self else None

    def size(self, name: str, *, default: int | None = None, zero: bool = False) -> int:
        """A positive integer (or 0, with `zero`); without a default the field must be there."""
        if default is None and name not in self:
            raise self.error(name, "is missing")
        value = self.get(name, default if default is not None else 0)
        if value < (0 if zero else 1):
            raise self.error(name, f"must be at least {0 if zero else 1}, found {value}")
        return value

    def within(self, under: Mapping[str, Any], over: Mapping[str, Any]) -> "Fields":
        """These fields; those of `under` where they have none, and those of `over` in any case."""
        return Fields({**under, **self._values, **over}, self.where)

    def section(self, name: str) -> "Fields | None":
        """A nested object, or None where absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"expected an object, found {value!r}")
        return Fields(value, f"{self.where}: {name}")


def read_fields(path: Path) -> Fields:
    """Reads a JSON object from a file of a model folder."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.name} is missing from {path.parent}") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path.name} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path.name} is not a JSON object")
    return Fields(values, path.name)


def read_config(folder: Path) -> ModelConfig:
    """Reads `config.json` of a Hugging Face model folder.

    Raises:
        ModelLoadError: a file or field is missing, malformed or asks for something not served; names the
        field.
    """
    fields = read_fields(folder / "config.json")
    name = _architecture(fields)
    translate = family(name)
    if translate is None:
        raise fields.error("architectures", f"{name!r} is not served; these are: {', '.join(FAMILIES)}")
    return translate(name, fields)


def _architecture(fields: Fields) -> str:
    """The one that the file names; without `architectures` that of its `model_type`."""
    names, kind = fields.raw("architectures"), fields.raw("model_type")
    if names is None and kind is not None:
        if not isinstance(kind, str) or kind not in MODEL_TYPES:
            known = ", ".join(MODEL_TYPES)
            raise fields.error("model_type", f"{kind!r} is not served without architectures, only {known}")
        return MODEL_TYPES[kind]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", f"expected a list of one name, found {names!r}")
    return names[0]


def read_generation_defaults(folder: Path, vocab_size: int) -> GenerationDefaults:
    """Reads `generation_config.json`, which may be absent; its EOS ids fall back to `config.json`'s.

    Raises:
        ModelLoadError: a field is malformed, or an EOS id lies outside the vocabulary.
    """
    path = folder / "generation_config.json"
    fields = read_fields(path) if path.exists() else Fields({}, path.name)
    source = fields if "eos_token_id" in fields else read_fields(folder / "config.json")
    return GenerationDefaults(
        eos=_token_ids(source, "eos_token_id", vocab_size),
        temperature=fields.optional_number("temperature", zero=True),
        top_p=fields.optional_number("top_p", high=1.0),
        top_k=fields.size("top_k", zero=True) if "top_k" in fields else None,
        min_p=fields.optional_number("min_p", zero=True, high=1.0),
        repetition_penalty=fields.optional_number("repetition_penalty"),
    )


def _token_ids(fields: Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    value = fields.raw(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise fields.error(name, f"{token!r} is no id of a vocabulary of {vocab_size}")
    return tuple(ids)
