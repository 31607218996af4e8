"""The shape of a chat answer: reasoning, then text, free or bound, or calls; as a grammar and as a parser."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from personae.grammar.reasoning.format import ReasoningFormat, Thinks
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import (
    Element,
    Exactly,
    Json,
    OneOf,
    Repeat,
    Sequence,
    Text,
    Until,
    structure_spec,
)
from personae.grammar.structure.marks import Marks
from personae.grammar.structure.parser import AnswerParser
from personae.grammar.tools.format import Function, ToolFormat

ToolUse = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What one answer may consist of.

    `thinks` says where it begins (`reasoning` is set unless it is NO). `functions` may be called if `tools`,
    the way to write it, is set; `use` says whether. `content` binds an answer that is no call.
    """

    reasoning: ReasoningFormat | None = None
    thinks: Thinks = Thinks.NO
    tools: ToolFormat | None = None
    functions: tuple[Function, ...] = ()
    use: ToolUse = "none"
    parallel: bool = True
    content: Element | None = None

    def spec(self) -> GrammarSpec | None:
        """What binds the answer; None if nothing does."""
        body = self._body()
        if body is None:
            return None
        if self.reasoning is None or self.thinks is Thinks.NO:
            return structure_spec(body)
        if self.thinks is Thinks.OPEN:
            return structure_spec(Sequence((Until(self.reasoning.close), body)))
        thought = Sequence((Exactly(" " + self.reasoning.open), Until(self.reasoning.close)))
        return structure_spec(Sequence((Repeat(thought, 0, 1), body)))

    def parser(self, special: Mapping[str, int], *, shown: bool = False) -> AnswerParser:
        """A parser for one such answer. `special` maps the names of special tokens to ids; `shown` leaves
        those in the text that have no meaning there."""
        texts = self.tools.texts if self.tools is not None else ""
        if self.reasoning is not None:
            texts += f" {self.reasoning.open} {self.reasoning.close}"
        return AnswerParser(
            Marks(special, texts),
            reasoning=self.reasoning,
            thinks=self.thinks,
            tools=self.tools if self.use != "none" else None,
            anywhere=self.content is None and self.use == "auto",
            shown=shown,
        )

    def _body(self) -> Element | None:
        """What follows the reasoning."""
        content = self.content
        if content is not None and (self.thinks is not Thinks.NO or isinstance(content, Json)):
            content = Sequence((Exactly(" "), content))
        if self.tools is None:
            return content
        if self.use == "required":
            return self.tools.calls(self.functions, parallel=self.parallel)
        if self.use == "auto" and content is not None:
            return OneOf((self.tools.calls(self.functions, parallel=self.parallel), content))
        return content or self._free(self.tools)

    def _free(self, tools: ToolFormat) -> Element | None:
        """Text, with calls at its end if they are allowed."""
        opening = (self.reasoning.open,) if self.reasoning and self.thinks is Thinks.MAYBE else ()
        if self.use == "none":
            return Text((tools.trigger,), opening) if tools.anywhere else None
        if tools.anywhere:
            calls = tools.calls(self.functions, parallel=self.parallel, triggered=True)
            return OneOf((Text((tools.trigger,), opening), Sequence((Until(tools.trigger, opening), calls))))
        calls = tools.calls(self.functions, parallel=self.parallel)
        return OneOf((Text((), (tools.trigger, *opening)), calls))
