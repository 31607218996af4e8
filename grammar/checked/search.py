"""Searches for a completion with which a whole answer is valid.

The looser grammar gives a completion, whose answer may be invalid. The search changes one value after the
other where the validator finds errors, and follows the answers with the fewest errors first. All bounds are
counts, so the same question always has the same result: an answer that is replayed gets the same completions.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from heapq import heappop, heappush
from itertools import count, islice
from typing import Any, NamedTuple

from jsonschema_rs import ValidationError

from personae.grammar.checked.document import Steps, changes, loaded, without_repeats
from personae.grammar.checked.values import USUAL, Mentioned, mentioned
from personae.grammar.schema.document import parse_with_validator
from personae.grammar.schema.walk import NAMED

_MOST_ERRORS = 8
_DEEP = 4  # alternatives within alternatives
_MENTIONED = 48  # names and values of the whole schema, and those of the part that is violated
_OF_PART = 24
_AROUND = 3
_LONG = 256  # characters
_WRONG = (ValueError, RecursionError)


class Fault(NamedTuple):
    """Where an answer is invalid, and the path of the schema that it violates there."""

    place: Steps
    schema: Steps


_Ranked = tuple[int, int, int, str]


class Validator:
    """Judges whole answers to one schema, and knows what they may have to contain."""

    def __init__(self, source: str) -> None:
        self._document, self._validator = parse_with_validator(source)
        self._whole = mentioned(self._document, self._document, _MENTIONED).then(USUAL)
        self._parts: dict[Steps, Mentioned] = {}

    @property
    def values(self) -> list[str]:
        """Values that an answer may have to contain, as JSON."""
        return self._whole.values

    def accepts(self, answer: str | bytes) -> bool:
        """Whether the answer is valid, and no name comes twice in an object."""
        try:
            return bool(self._validator.is_valid(loaded(answer)))
        except _WRONG:
            return False

    def faults(self, answer: str) -> list[Fault] | None:
        """Where the answer is invalid; at most a few places. None if it is not JSON at all."""
        try:
            errors = islice(self._validator.iter_errors(loaded(answer)), _MOST_ERRORS)
            return [fault for error in errors for fault in _faults(error)]
        except _WRONG:
            return None

    def mentioned(self, faults: Sequence[Fault]) -> Mentioned:
        """What may mend an answer with these faults, the likeliest first."""
        found = self._whole
        for fault in reversed(faults):
            part = self._parts.get(fault.schema)
            if part is None:
                part = self._parts[fault.schema] = self._part(fault.schema)
            found = part.then(found)
        return found

    def _part(self, path: Steps) -> Mentioned:
        """What the schema at a path mentions, and then those around it."""
        here: Any = self._document
        around, by_name = [here], False
        with suppress(LookupError, TypeError):
            for step in path:
                here, by_name = here[step], not by_name and step in NAMED
                if not by_name and isinstance(here, dict):
                    around.append(here)
        parts = (mentioned(one, self._document, _OF_PART) for one in around[: -_AROUND - 1 : -1])
        return reduce(Mentioned.then, parts)


def _faults(error: ValidationError, depth: int = 0) -> list[Fault]:
    """Where an answer violates a keyword. If it fits none of several schemas: also where it violates those
    that it fits best, the one with the deepest fault and the one with the fewest."""
    here = Fault(tuple(error.instance_path), tuple(error.schema_path)[:-1])
    ways = getattr(error.kind, "context", ())
    if depth >= _DEEP or not ways or not all(ways):  # of a value that fits too many, some have no errors
        return [here]
    found = [[fault for one in way[:_MOST_ERRORS] for fault in _faults(one, depth + 1)] for way in ways]
    deepest = max(found, key=lambda faults: max(len(fault.place) for fault in faults))
    return [*dict.fromkeys((*deepest, *min(found, key=len), here))]


def repaired(
    validator: Validator, kept: int, answers: Iterable[str], most: int, tried: "Tried | None" = None
) -> Iterator[str]:
    """Change the given answers until they are valid, and yield those. Their first `kept` characters stay.
    At most `most` answers are tried; a long one counts for several. `tried` are those of an earlier search,
    which goes on here; they count, too."""
    tried = Tried(validator) if tried is None else tried
    for given in answers:
        if tried.add(given, 0):
            yield given
        elif tried.add(fewer := without_repeats(given, kept), 0):
            yield fewer
    while (best := tried.best()) is not None:
        text, depth, faults = best
        places = [fault.place for fault in faults]
        for other in changes(text, kept, places, *validator.mentioned(faults)):
            if tried.spent >= most:
                return
            if tried.add(other, depth + 1):
                yield other


class Tried:
    """The answers that were tried, and those of them that may be changed next. `spent` is their number, with
    long ones counted for several."""

    def __init__(self, validator: Validator) -> None:
        self._validator = validator
        self._seen: set[str] = set()
        self.spent = 0
        self._order = count()
        # With equally many faults, in turn: the most changed, which has come far, and the shortest.
        self._deep: list[_Ranked] = []
        self._short: list[_Ranked] = []
        self._turns = 0
        self._open: dict[str, tuple[int, list[Fault]]] = {}

    def add(self, text: str, depth: int) -> bool:
        """Try an answer that was changed `depth` times. Returns whether it is valid, and new."""
        if text in self._seen:
            return False
        self._seen.add(text)
        self.spent += 1 + len(text) // _LONG
        faults = self._validator.faults(text)
        if faults:
            self._open[text] = depth, faults
            order = next(self._order)
            heappush(self._deep, (len(faults), -depth, order, text))
            heappush(self._short, (len(faults), len(text), order, text))
        return faults == []

    def best(self) -> tuple[str, int, list[Fault]] | None:
        """The answer to change next, how often it was changed, and its faults. None if there is none."""
        self._turns += 1
        heap = self._deep if self._turns % 2 else self._short
        while heap:
            text = heappop(heap)[-1]
            if text in self._open:
                return (text, *self._open.pop(text))
        return None
