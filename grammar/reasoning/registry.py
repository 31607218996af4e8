"""The reasoning formats by name, and the detection of a chat template's format."""

from importlib import import_module

from personae.errors import ModelLoadError
from personae.grammar.reasoning.format import ReasoningFormat

NAMES = ("harmony", "gemma4", "think", "bracket_think")


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of that name. Raises ModelLoadError if it does not exist."""
    if name not in NAMES:
        raise ModelLoadError(f"There is no reasoning format {name!r}. The formats are {', '.join(NAMES)}.")
    format: ReasoningFormat = import_module(f"personae.grammar.reasoning.{name}").FORMAT
    return format


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """The format in which the model of a chat template reasons. None if it does not reason."""
    for name in NAMES:
        format = reasoning_format(name)
        if all(sign in template for sign in format.signs):
            return format
    return None
