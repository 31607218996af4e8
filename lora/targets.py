"""Which modules an adapter's config puts LoRA on. PEFT decides this from a module's name in the base.

`target_modules` is a list of names or ends of names, one regular expression for the whole name, or
"all-linear". `exclude_modules` is the same for excluded modules. `layers_to_transform` limits the modules
that a list selects by the end of their name to some layers; `layers_pattern` finds the layer in a name. Rules
and precedence are those of PEFT 0.21 (`check_target_module_exists`).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from personae.errors import AdapterError
from personae.lora.patterns import NamePattern
from personae.lora.peft_names import refusal

MAX_EXPRESSION = 2048  # characters; trainers write a few hundred
ALL_LINEAR = "all-linear"  # all but the output matrix
LAYERS_NAME = re.compile(r"[A-Za-z0-9_.]{1,64}")

Selects = Callable[[str], bool]


class Targets:
    """Takes the config's fields, and the names of modules that are trained in full, which have no LoRA.

    Raises AdapterError, with the field as `param`, for what PEFT does not accept either.
    """

    def __init__(self, fields: Mapping[str, Any], saved: frozenset[str]) -> None:
        wanted = fields.get("target_modules")
        self._wanted = None if wanted is None else _selection("target_modules", wanted)
        self._by_whole_name = frozenset(wanted if isinstance(wanted, list) else ())  # in any layer
        excluded = fields.get("exclude_modules")
        self._excluded = _selection("exclude_modules", excluded) if excluded else None
        self._layers = _layers(fields)
        self._layer = _layer_of(fields.get("layers_pattern") or [])
        self._saved = saved
        self._tied = {"lm_head"} if fields.get("ensure_weight_tying") else set()
        for field in ("layers_to_transform", "layers_pattern"):
            if isinstance(wanted, str) and fields.get(field) not in (None, []):
                raise _wrong(field, "it cannot be used if target_modules is a string")
        if fields.get("layers_to_transform") is None and fields.get("layers_pattern"):
            raise _wrong("layers_pattern", "it needs layers_to_transform")

    def check(self, tensor: str, module: str) -> None:
        """Raises AdapterError, with the tensor as `param`, if its module has no LoRA."""
        field = self.missed_by(module)
        if field is not None:
            raise refusal(tensor, f"the config's {field} excludes {module}, so PEFT would not apply it")

    def missed_by(self, module: str) -> str | None:
        """The field that excludes the module, by its dotted name in the base; None if it has LoRA.

        Without `target_modules`, PEFT uses a table of models. Here, every module with tensors then has LoRA.
        """
        if self._excluded is not None and self._excluded(module):
            return "exclude_modules"
        if module.rpartition(".")[2] in self._saved:
            return "modules_to_save"
        if module in self._tied:
            return None
        if self._wanted is not None and not self._wanted(module):
            return "target_modules"
        if self._layers is None or module in self._by_whole_name or self._layer(module) in self._layers:
            return None
        return "layers_to_transform"


def _selection(field: str, value: Any) -> Selects:
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        names, ends = frozenset(value), tuple(f".{name}" for name in value)
        return lambda module: module in names or module.endswith(ends)
    if not isinstance(value, str):
        raise _wrong(field, "it must be a string or a list of strings")
    if field == "target_modules" and value.lower() == ALL_LINEAR:
        return lambda module: not module.endswith(("lm_head", "embed_tokens"))
    if len(value) > MAX_EXPRESSION:
        raise _wrong(field, f"it is longer than {MAX_EXPRESSION} characters; write out the modules' names")
    try:
        expression = NamePattern(value)
    except AdapterError as error:
        raise _wrong(field, error.message) from None

    def selects(module: str) -> bool:
        try:
            return expression.matches_whole(module)
        except AdapterError as error:
            raise _wrong(field, error.message) from None

    return selects


def _layers(fields: Mapping[str, Any]) -> frozenset[int] | None:
    """The selected layers; None for all."""
    value = fields.get("layers_to_transform")
    listed = [value] if type(value) is int else value or []
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        raise _wrong("layers_to_transform", "it must be a layer number or a list of layer numbers")
    return frozenset(listed) or None


def _layer_of(patterns: Any) -> Callable[[str], int | None]:
    """Finds the layer in a module's name: the number after one of the patterns, or the first number."""
    listed = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(listed, list) or not all(
        isinstance(name, str) and LAYERS_NAME.fullmatch(name) for name in listed
    ):
        raise _wrong("layers_pattern", "it must be a name such as layers, or a list of such names")
    places = [re.compile(rf"(?:^|.*?\.){name}\.(\d+)\.") for name in listed]
    places = places or [re.compile(r".*?\.[^.]*\.(\d+)\.")]

    def layer(module: str) -> int | None:
        match = next((match for place in places if (match := place.match(module))), None)
        return None if match is None else int(match[1])

    return layer


def _wrong(field: str, reason: str) -> AdapterError:
    return AdapterError(f"adapter_config.json: {field}: {reason}", param=field)
