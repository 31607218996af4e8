"""Judges whole answers by the schemas of their parts, and completes them so that all parts are valid."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from personae.grammar.backend import CompiledGrammar
from personae.grammar.checked.parts import CheckedPart, ParsedAnswer, PartSchema, Terms, reader
from personae.grammar.checked.texts import AnswerTexts, Raw
from personae.grammar.structure.elements import (
    Concat,
    Element,
    Exactly,
    FreeText,
    Json,
    OneOf,
    Regex,
    Repeat,
    Until,
    Verbatim,
)


class Answers:
    """The valid answers of a structure. `schema_of` gives what binds each of its strict JSON parts, and
    `compiled` the grammar of a regular expression over bytes. `special` maps the names of special tokens to
    their elements of pieces.

    Raises GrammarError for a structure with a grammar.
    """

    def __init__(
        self,
        element: Element,
        schema_of: Callable[[Json], PartSchema],
        compiled: Callable[[Regex], CompiledGrammar],
        special: Mapping[str, int],
    ) -> None:
        self._texts = AnswerTexts(special, " ".join(_fixed_texts(element)))
        self._read = reader(element, Terms(self._texts.put, schema_of, compiled))

    def accepts(self, answer: Raw) -> bool:
        """Whether the answer is complete and valid."""
        text = self._texts.decode(answer)
        faults = self._faults(text)
        return faults is not None and not faults

    def completions(self, written: Raw, begun: Iterable[Raw], allows: Callable[[Raw], bool]) -> Iterator[Raw]:
        """Completions of what is written, with which the answer is valid. In those in `begun`, the parts that
        are invalid are completed otherwise. `allows` says whether a completion may begin like this."""
        kept = len(self._texts.decode(written))
        for one in dict.fromkeys(begun):
            text = self._texts.decode(written + one)
            faults = self._faults(text)
            if faults is None or any(part.end < kept for part in faults):
                continue

            def allowed(changed: str) -> bool:
                return allows(self._texts.encode(changed)[len(written) :])

            for answer in _mended(text, kept, faults, allowed):
                yield self._texts.encode(answer)[len(written) :]

    def _faults(self, text: str) -> Sequence[CheckedPart] | None:
        """The invalid parts. None if the text is no answer at all."""
        parsed = ParsedAnswer(text)
        parts = self._read(parsed, 0).get(len(text))
        return None if parts is None else parsed.faults(parts)


def _mended(
    text: str, kept: int, faults: Sequence[CheckedPart], allows: Callable[[str], bool]
) -> Iterator[str]:
    """Texts in which each faulty value is replaced by a valid one. Several values are tried for the last one
    only."""
    if not faults:
        yield text
        return
    part, *others = faults
    before, value, after = text[: part.start], text[part.start : part.end], text[part.end :]
    written, example = value[: max(kept - part.start, 0)], part.schema.example
    known = [example] if example.startswith(written) else []
    for changed in chain(known, part.schema.completions(written)):
        if not others:
            yield before + changed + after
        elif allows(before + changed):
            longer = len(changed) - len(value)
            moved = [one._replace(start=one.start + longer, end=one.end + longer) for one in others]
            yield from _mended(before + changed + after, kept, moved, allows)
            return


def _fixed_texts(element: Element) -> Iterator[str]:
    match element:
        case Exactly(text=text) | Verbatim(text=text):
            yield text
        case Until(end=end, openings=openings, without=without):
            yield from (end, *openings, *without)
        case FreeText(openings=openings, without=without):
            yield from (*openings, *without)
        case Concat(parts=parts) | OneOf(parts=parts):
            for part in parts:
                yield from _fixed_texts(part)
        case Repeat(part=part):
            yield from _fixed_texts(part)
