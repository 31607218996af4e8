"""Interprets the values of `--model NAME=MODEL`."""

import re
from pathlib import Path

from personae.api.bundled import check_model

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,63})?")


def named_models(values: tuple[str, ...]) -> dict[str, Path]:
    """The models by their names, in the order of the values. Raises ValueError if a value is no
    `NAME=MODEL`, a name is given twice, or a model cannot be one."""
    models: dict[str, Path] = {}
    for value in values:
        name, equals, model = value.partition("=")
        if not equals or not model:
            raise ValueError(
                f"'{value}' names no model; write NAME=MODEL, as small=Qwen/Qwen3-0.6B. A single model can "
                "also be the argument before the options."
            )
        if _NAME.fullmatch(name) is None:
            raise ValueError(
                f"'{name}' cannot be a model's name: it has letters, digits, '.', '_' and '-', at most 64."
            )
        if name in models:
            raise ValueError(f"the name '{name}' is given twice")
        models[name] = check_model(Path(model).expanduser())
    return models


def check_models(values: tuple[str, ...]) -> tuple[str, ...]:
    """The values, if they are valid. Raises ValueError."""
    named_models(values)
    return values
