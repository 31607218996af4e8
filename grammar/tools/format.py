"""How a model family writes its tool calls: one description, from which both the grammar that binds calls
(here) and the parser that reads them (structure/parser.py) are derived."""

import re
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from personae.grammar.structure.elements import Concat, Element, Exactly, OneOf, Repeat
from personae.grammar.tools.arguments import Arguments, JsonArguments
from personae.grammar.tools.function import Function


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Calls are written as `open call between call … close`. Each call is written as

        before_name NAME after_name ARGUMENTS after_arguments

    In these texts a space stands for blanks that a model may or may not write, and `#` for a number.
    `trigger` is how the calls begin; free text never contains it. If it could also be text, as a brace could,
    it counts only at the beginning of an answer, and `anywhere` is false. `single`: a model makes at most one
    call per answer. `other` is a second way in which it may write calls, if `anywhere` is false. `signs` are
    texts of a chat template whose model writes this format. `id` is the form of ids that its template
    accepts: `{random}` are hexadecimal digits, `{number}` is what `#` stood for.
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
    arguments: Arguments = field(default_factory=JsonArguments)
    anywhere: bool = True
    single: bool = False
    id: str = "call_{random:.24}"
    other: "ToolFormat | None" = None

    def __post_init__(self) -> None:
        assert (self.open + self.before_name).startswith(self.trigger), "calls begin with their trigger"
        assert self.other is None or not self.anywhere, "text can be free of one trigger only"

    @property
    def texts(self) -> str:
        """All the texts. Special tokens outside of them do not matter."""
        around = [
            self.open,
            self.before_name,
            self.after_name,
            self.after_arguments,
            self.between,
            self.close,
        ]
        return " ".join([*around, self.arguments.texts, self.other.texts if self.other else ""])

    @property
    def ways(self) -> "tuple[ToolFormat, ...]":
        """This format, and the other way if there is one."""
        return (self,) if self.other is None else (self, self.other)

    @property
    def begins_json(self) -> bool:
        """Whether JSON may begin as calls do."""
        return self.trigger in ("{", "[")

    def openings(self, functions: Many[Function]) -> tuple[str, ...]:
        """The texts before the arguments of a first call."""
        return tuple(
            f" {way.open}{way.before_name}{function.name}{way.after_name}"
            for way in self.ways
            for function in functions
        )

    def written(self, calls: Many[tuple[str, Mapping[str, Any] | str]]) -> str:
        """Calls as a model usually writes them, each from its name and its arguments. Arguments that are text
        are written unchanged where the format writes an object."""
        texts = [
            _spelled(self.before_name)
            + name
            + _spelled(self.after_name).replace("#", str(number))
            + self.arguments.written(arguments)
            + _spelled(self.after_arguments)
            for number, (name, arguments) in enumerate(calls)
        ]
        between = "\n" if self.between == " " else _spelled(self.between)
        return _spelled(self.open) + between.join(texts) + _spelled(self.close)

    def calls(
        self,
        functions: Many[Function],
        *,
        parallel: bool,
        triggered: bool = False,
        or_json: bool = False,
    ) -> Element:
        """One call, or one or more with `parallel`. `triggered`: the trigger has been written already.
        `or_json`: JSON may be there instead."""
        or_json = or_json and self.begins_json
        ways = [way._calls(functions, parallel, triggered, or_json) for way in self.ways]
        return ways[0] if len(ways) == 1 else OneOf(tuple(ways))

    def _calls(self, functions: Many[Function], parallel: bool, triggered: bool, or_json: bool) -> Element:
        named = [(function.name, self.arguments.element(function)) for function in functions]
        start = self.open + self.before_name
        start = start[len(self.trigger) :] if triggered else " " + start
        parts = [self._call(start, named, or_json)]
        if parallel and not self.single:
            parts.append(Repeat(self._call(self.between + self.before_name, named)))
        if not self.single:
            parts.append(Exactly(self.close + " "))  # some models end with a line break
        return Concat(tuple(parts))

    def _call(self, before: str, named: Many[tuple[str, Element]], or_json: bool = False) -> Element:
        after = Exactly(self.after_arguments)
        return OneOf(
            tuple(
                Concat((*_head(before + name + self.after_name, or_json), arguments, after))
                for name, arguments in named
            )
        )


def _spelled(text: str) -> str:
    """A text of a format with the blanks that models usually write: JSON as Python writes it, no blanks next
    to brackets and tags, fences on lines of their own."""
    text = re.sub(r" ?```(json)? ?", lambda fence: f"\n```{fence[1]}\n" if fence[1] else "\n```", text)
    text = re.sub(r" ?([:,;]) ", r"\1 ", text)
    return re.sub(r"(?<=[\[{(>\]})]) | (?=[\]})<\[{])|^ (?![:,;])", "", text)


def _head(text: str, or_json: bool) -> tuple[Element, ...]:
    """What comes before the arguments. Where JSON may be instead, it may go on as a call until the last name
    of a member is written."""
    if not or_json:
        return (Exactly(text),)
    members, comma, last = text.rpartition(", ")
    return (Exactly(members + comma, True), Exactly(last)) if comma else (Exactly(text, True),)
