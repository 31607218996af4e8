"""The shape of a chat answer: reasoning, then text (free or bound) or calls. It gives both a grammar and a
parser."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from personae.grammar.reasoning.format import ReasoningFormat, Thinks
from personae.grammar.spec import GrammarSpec, ReasoningLimit
from personae.grammar.structure.elements import (
    Concat,
    Element,
    Exactly,
    FreeText,
    Json,
    OneOf,
    Repeat,
    Until,
    structure_spec,
)
from personae.grammar.structure.marks import Marks
from personae.grammar.structure.parser import AnswerParser
from personae.grammar.tools.format import ToolFormat
from personae.grammar.tools.function import Function

ToolUse = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What one answer may consist of.

    `thinks` says where the answer begins (`reasoning` is set unless it is NO). `functions` may be called if
    `tools`, the way to write calls, is set; `use` says whether they may or must. `content` binds an answer
    that is not a call. `limit` is the most tokens of reasoning.
    """

    reasoning: ReasoningFormat | None = None
    thinks: Thinks = Thinks.NO
    tools: ToolFormat | None = None
    functions: tuple[Function, ...] = ()
    use: ToolUse = "none"
    parallel: bool = True
    content: Element | None = None
    limit: int | None = None

    @property
    def tells_calls(self) -> bool:
        """Whether calls and text can be told apart."""
        if self.use != "auto" or self.tools is None or self.content is None:
            return True
        return self.tools.anywhere or bool(self._opener()) or isinstance(self.content, Json)

    def spec(self) -> GrammarSpec | None:
        """What binds the answer; None if nothing does."""
        body, limit = self._body(), self._limit()
        if body is None:
            if limit is None:
                return None
            body = self._text(FreeText((), self._opening()))
        return msgspec.structs.replace(structure_spec(Concat((*self._thoughts(), body))), reasoning=limit)

    def parser(self, special: Mapping[str, int], *, shown: bool = False) -> AnswerParser:
        """A parser for one such answer. `special` maps the names of special tokens to ids. `shown` keeps
        those in the text that have no meaning there."""
        texts = self.tools.texts if self.tools is not None else ""
        if self.reasoning is not None:
            texts += f" {self.reasoning.texts}"
        return AnswerParser(
            Marks(special, texts),
            reasoning=self.reasoning,
            thinks=self.thinks,
            tools=self.tools if self.use != "none" else None,
            anywhere=self.content is None and self.use == "auto",
            functions={function.name: function for function in self.functions},
            shown=shown,
        )

    def _limit(self) -> ReasoningLimit | None:
        format = self.reasoning
        if self.limit is None or format is None or self.thinks is Thinks.NO:
            return None
        opened, again = self.thinks.inside, bool(format.joint)
        others = (format.aside,) if format.aside else ()
        return ReasoningLimit(self.limit, format.open, format.close, opened, again, others, format.text)

    def _opening(self) -> tuple[str, ...]:
        """How text must not begin, because it would be reasoning."""
        return (self.reasoning.open,) if self.reasoning and self.thinks is Thinks.MAYBE else ()

    def _thoughts(self) -> tuple[Element, ...]:
        """What comes before the answer itself."""
        format = self.reasoning
        if format is None or self.thinks is Thinks.NO:
            return ()
        rest = (Until(format.close), *((Exactly(" " + format.joint),) if format.joint else ()))
        thought = Concat((Exactly(" " + format.open), *rest))
        opened = rest if self.thinks.inside else ()
        if format.joint:
            aside = (Concat((Exactly(" " + format.aside), *rest)),) if format.aside else ()
            return (*opened, Repeat(OneOf((thought, *aside))))
        return opened or (Repeat(thought, 0, 1),)

    def _body(self) -> Element | None:
        """What follows the reasoning."""
        content = None if self.content is None else self._text(self.content)
        if self.tools is None:
            return content
        if self.use == "required":
            return self.tools.calls(self.functions, parallel=self.parallel)
        if self.use == "auto" and self.content is not None:
            return self._calls_or(self.content, self.tools)
        return content or self._free(self.tools)

    def _calls_or(self, content: Element, tools: ToolFormat) -> Element:
        """Calls, or text that does not begin as they do."""
        if isinstance(content, Json) and tools.begins_json:
            content = msgspec.structs.replace(content, openings=tools.openings(self.functions))
        calls = tools.calls(self.functions, parallel=self.parallel, or_json=True)
        return OneOf((calls, self._text(content)))

    def _free(self, tools: ToolFormat) -> Element | None:
        """Text, with calls at its end if they are allowed."""
        opening = self._opening()
        framed = bool(self._opener())
        if self.use == "none":
            text = FreeText((tools.trigger,) if tools.anywhere else (), opening)
            return self._text(text) if tools.anywhere or framed else None
        calls = tools.calls(self.functions, parallel=self.parallel, triggered=tools.anywhere)
        if tools.anywhere:
            return OneOf(
                (FreeText((tools.trigger,), opening), Concat((Until(tools.trigger, opening), calls)))
            )
        return OneOf((self._text(FreeText((), () if framed else (tools.trigger, *opening))), calls))

    def _text(self, content: Element) -> Element:
        """The answer's text, after what opens it."""
        opener = self._opener()
        blank = " " if isinstance(content, Json) or (self.thinks is not Thinks.NO and not opener) else ""
        if isinstance(content, FreeText) and not opener:
            return content
        return Concat((Exactly(opener + blank), content)) if opener or blank else content

    def _opener(self) -> str:
        if self.reasoning is None or self.thinks is Thinks.NO or not self.reasoning.text:
            return ""
        return " " + self.reasoning.text
