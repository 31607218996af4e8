"""The reasoning formats by name, and which of them a chat template is written for."""

from importlib import import_module

from personae.errors import ModelLoadError
from personae.grammar.reasoning.format import ReasoningFormat

NAMES = ("harmony", "gemma4", "think", "bracket_think")


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of that name. Raises ModelLoadError when there is none."""
    if name not in NAMES:
        raise ModelLoadError(f"There is no reasoning format {name!r}; there are {', '.join(NAMES)}.")
    format: ReasoningFormat = import_module(f"personae.grammar.reasoning.{name}").FORMAT
    return format


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """The format that a chat template's model reasons in, if it does."""
    for name in NAMES:
        format = reasoning_format(name)
        if all(sign in template for sign in format.signs):
            return format
    return None
