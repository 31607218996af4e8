"""How a model family writes its tool calls: one description, from which both the grammar that binds the calls
(here) and the parser that reads them (structure/parser.py) are derived.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from personae.grammar.structure.elements import Element, Exactly, Json, Lark, OneOf, Regex, Repeat, Sequence
from personae.grammar.structure.escaped import escaped_lark

NAME = r"[A-Za-z0-9_.-]"
"""What names of functions are made of."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. `parameters` is the JSON Schema of its arguments, an object.

    `strict`: all of the schema is enforced; otherwise as much as can be. Errors name `param` as their field.
    A `custom` tool has one argument, `input`; `text` binds that, if anything does.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool
    param: str
    custom: bool = False
    text: Regex | Lark | None = None


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Calls are written `open call between call … close`, and each of them

        before_name NAME after_name ARGUMENTS after_arguments

    with the arguments as a JSON object. In these texts a space stands for blanks that a model may or may not
    write. `trigger` is what the calls begin with: free text never contains it. Where it could be meant as
    text, as a brace could, it counts only at the beginning of an answer: then `anywhere` is false.
    `signs` are what a chat template contains if its model writes this format. `id_length` is for models whose
    templates accept only ids of so many letters and digits.
    """

    name: str
    signs: tuple[str, ...]
    trigger: str
    before_name: str
    after_name: str
    after_arguments: str
    open: str = ""
    between: str = " "
    close: str = ""
    anywhere: bool = True
    id_length: int | None = None

    def __post_init__(self) -> None:
        assert (self.open + self.before_name).startswith(self.trigger), "calls begin with their trigger"

    @property
    def texts(self) -> str:
        """All the texts: what a special token has to occur in to matter."""
        return " ".join(
            [self.open, self.before_name, self.after_name, self.after_arguments, self.between, self.close]
        )

    def calls(self, functions: Many[Function], *, parallel: bool, triggered: bool = False) -> Element:
        """One call, or with `parallel` one or more. `triggered`: the trigger has been written already."""
        start = self.open + self.before_name
        start = start[len(self.trigger) :] if triggered else " " + start
        parts = [self._call(start, functions)]
        if parallel:
            parts.append(Repeat(self._call(self.between + self.before_name, functions)))
        if self.close:
            parts.append(Exactly(self.close))
        return Sequence(tuple(parts))

    def _call(self, before_name: str, functions: Many[Function]) -> Element:
        return OneOf(
            tuple(
                Sequence(
                    (
                        Exactly(before_name + function.name + self.after_name),
                        _arguments(function),
                        Exactly(self.after_arguments),
                    )
                )
                for function in functions
            )
        )


def _arguments(function: Function) -> Element:
    """A JSON object."""
    if isinstance(function.text, Lark):
        text = Lark(escaped_lark(function.text.source, function.param), function.param)
        return Sequence((Exactly('{ "input" : "'), text, Exactly('" }')))
    return Json(function.parameters, function.strict, function.param)
