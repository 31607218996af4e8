"""Builds a finite automaton of the texts that match an expression, including look-around and complements.

A state is what must be true of the rest of the text: a boolean function of statements "the rest begins with a
character of this set, and continues like this" (derivatives of an alternating automaton). If an expression
looks behind, a state also holds how far each look-behind has got.
"""

from dataclasses import dataclass
from functools import lru_cache

from personae.grammar.regex import charset
from personae.grammar.regex.charset import Ranges
from personae.grammar.regex.decisions import FALSE, TRUE, Decisions
from personae.grammar.regex.parse import (
    Alternation,
    Chars,
    Edge,
    Look,
    Node,
    NotRegular,
    Repeat,
    Sequence,
)

_MOST_STATES = 1_000
_MOST_WORK = 300_000
_DONE, _END = -1, 0  # of what is left: nothing more is required; the text has to end
_Flags = tuple[bool, bool, tuple[bool, ...]]
"""At a place: whether it is the start, whether a word character is before it, and which look-behinds end
there."""
_State = tuple[int, tuple[int, ...], bool]
"""What must be true of the rest, the same for each look-behind, and whether the last character was a word
character."""


@dataclass(frozen=True, slots=True)
class Automaton:
    """Deterministic and complete, with the fewest possible states. State 0 is the first."""

    classes: tuple[Ranges, ...]
    steps: tuple[tuple[int, ...], ...]
    accepting: tuple[bool, ...]

    @property
    def empty(self) -> bool:
        """Whether no text is accepted."""
        return not any(self.accepting)


@lru_cache(256)
def automaton(matched: tuple[Node, ...], unmatched: tuple[Node, ...] = ()) -> Automaton:
    """The automaton of the texts in which all of `matched` are found, and none of `unmatched`.

    Raises NotRegular if the language is not known to be regular, or the automaton is too large.
    """
    try:
        return _Builder(matched, unmatched).build()
    except RecursionError:
        raise NotRegular("it is nested too deeply") from None


class _Builder:
    def __init__(self, matched: tuple[Node, ...], unmatched: tuple[Node, ...]) -> None:
        self._decisions = Decisions()
        self._nodes: list[Node] = []
        self._numbers: dict[Node, int] = {}
        self._behind: list[Node] = []
        self._words = False
        sets: dict[Ranges, None] = {}
        for node in (*matched, *unmatched):
            self._read(node, sets, within_behind=False)
        self._wanted = [(node, True) for node in matched] + [(node, False) for node in unmatched]
        self._classes = charset.minterms(sets)
        self._is_word = self._members(charset.WORD)
        # What is left: a node, its least and greatest number of repetitions, and what is left after it. 0 is
        # the end.
        self._rests: list[tuple[int, int, int | None, int]] = [(0, 0, 0, 0)]
        self._rest_numbers: dict[tuple[int, int, int | None, int], int] = {}
        self._atoms: list[tuple[list[bool], int]] = [([False] * len(self._classes), _DONE)]  # 0: it ends
        self._atom_numbers: dict[tuple[Ranges, int], int] = {}
        self._closed: dict[tuple[int, _Flags], int] = {}
        self._open: set[int] = set()
        self._work = 0

    def _read(self, node: Node, sets: dict[Ranges, None], *, within_behind: bool) -> None:
        match node:
            case Chars(ranges):
                sets[ranges] = None
            case Sequence(parts) | Alternation(parts):
                for part in parts:
                    self._read(part, sets, within_behind=within_behind)
            case Repeat(inner):
                self._read(inner, sets, within_behind=within_behind)
            case Look(inner, ahead):
                if within_behind:
                    raise NotRegular("it looks around where it looks behind")
                self._read(inner, sets, within_behind=not ahead)
                if not ahead and inner not in self._behind:
                    self._behind.append(inner)
            case Edge(sign):
                if within_behind and sign != "^":
                    raise NotRegular("it looks around where it looks behind")
                if sign in "bB":
                    self._words = True
                    sets[charset.WORD] = None

    def _members(self, ranges: Ranges) -> list[bool]:
        return [bool(charset.intersection(one, ranges)) for one in self._classes]

    def build(self) -> Automaton:
        start = self._start()
        numbers, states = {start: 0}, [start]
        steps: list[list[int]] = []
        while len(steps) < len(states):
            row = []
            for letter in range(len(self._classes)):
                after = self._after(states[len(steps)], letter)
                if after not in numbers:
                    numbers[after] = len(states)
                    states.append(after)
                row.append(numbers[after])
            steps.append(row)
            if len(states) > _MOST_STATES:
                raise NotRegular("it has too many states")
        return _merged(tuple(self._classes), steps, [self._at_end(state[0]) for state in states])

    def _start(self) -> _State:
        nowhere: _Flags = (True, False, ())
        behind = tuple(self._closure(self._rest(node, _END), nowhere) for node in self._behind)
        flags = True, False, tuple(map(self._at_end, behind))
        whole = TRUE
        for node, wanted in self._wanted:
            rest = self._rest(node, _DONE)
            if not _is_anchored(node):
                rest = self._rest(Repeat(Chars(charset.ALL), 0, None), rest)
            found = self._closure(rest, flags)
            whole = self._decisions.both(whole, found if wanted else self._decisions.opposite(found))
        return whole, behind, False

    def _after(self, state: _State, letter: int) -> _State:
        word = self._words and self._is_word[letter]
        nowhere: _Flags = (False, word, ())
        behind = []
        for node, function in zip(self._behind, state[1], strict=True):
            begun = self._derived(function, letter, nowhere)
            behind.append(self._decisions.either(begun, self._closure(self._rest(node, _END), nowhere)))
        flags = False, word, tuple(map(self._at_end, behind))
        return self._derived(state[0], letter, flags), tuple(behind), word

    def _at_end(self, function: int) -> bool:
        """Whether the function is true where the text ends: of all atoms only the first is true there."""
        while function > TRUE:
            variable, low, high = self._decisions.nodes[function]
            function = low if variable else high
        return function == TRUE

    def _derived(self, function: int, letter: int, flags: _Flags) -> int:
        """What must be true of the rest after a character."""
        known = {FALSE: FALSE, TRUE: TRUE}

        def derive(one: int) -> int:
            if one not in known:
                self._count()
                variable, low, high = self._decisions.nodes[one]
                members, rest = self._atoms[variable]
                value = self._closure(rest, flags) if members[letter] else FALSE
                known[one] = self._decisions.choose(value, derive(high), derive(low))
            return known[one]

        return derive(function)

    def _count(self) -> None:
        self._work += 1
        if self._work + len(self._decisions.nodes) > _MOST_WORK:
            raise NotRegular("it is too large")

    def _rest(self, node: Node, rest: int) -> int:
        if node not in self._numbers:
            self._numbers[node] = len(self._nodes)
            self._nodes.append(node)
        return self._repeated(self._numbers[node], 1, 1, rest)

    def _repeated(self, node: int, least: int, most: int | None, rest: int) -> int:
        key = node, least, most, rest
        if key not in self._rest_numbers:
            self._rest_numbers[key] = len(self._rests)
            self._rests.append(key)
        return self._rest_numbers[key]

    def _atom(self, ranges: Ranges, rest: int) -> int:
        key = ranges, rest
        if key not in self._atom_numbers:
            self._atom_numbers[key] = len(self._atoms)
            self._atoms.append((self._members(ranges), rest))
        return self._decisions.variable(self._atom_numbers[key])

    def _closure(self, rest: int, flags: _Flags) -> int:
        """What must be true of the text from here on, so that it matches `rest`."""
        if rest == _DONE:
            return TRUE
        if rest == _END:
            return self._decisions.variable(0)
        key = rest, flags
        if key not in self._closed:
            if rest in self._open:
                return FALSE  # one more repetition that read nothing
            self._count()
            self._open.add(rest)
            found = self._closure_of(rest, flags)
            self._open.discard(rest)
            if self._open:
                return found  # it may be incomplete
            self._closed[key] = found
        return self._closed[key]

    def _closure_of(self, rest: int, flags: _Flags) -> int:
        number, least, most, then = self._rests[rest]
        if (least, most) != (1, 1):
            found = FALSE if least else self._closure(then, flags)
            if most != 0:
                fewer = self._repeated(number, max(least - 1, 0), None if most is None else most - 1, then)
                again = self._repeated(number, 1, 1, fewer)
                found = self._decisions.either(found, self._closure(again, flags))
            return found
        match self._nodes[number]:
            case Chars(ranges):
                return self._atom(ranges, then) if ranges else FALSE
            case Sequence(parts):
                for part in reversed(parts):
                    then = self._rest(part, then)
                return self._closure(then, flags)
            case Alternation(parts):
                found = FALSE
                for part in parts:
                    found = self._decisions.either(found, self._closure(self._rest(part, then), flags))
                return found
            case Repeat(inner, fewest, most_times):
                self._rest(inner, then)
                return self._closure(self._repeated(self._numbers[inner], fewest, most_times, then), flags)
            case Look(inner, ahead, negative):
                if ahead:
                    open_before, self._open = self._open, set()
                    found = self._closure(self._rest(inner, _DONE), flags)
                    self._open = open_before
                else:
                    found = TRUE if flags[2][self._behind.index(inner)] else FALSE
            case Edge(sign):
                found, negative = self._edge(sign, flags), sign == "B"
        if negative:
            found = self._decisions.opposite(found)
        return self._decisions.both(found, self._closure(then, flags)) if found != FALSE else FALSE

    def _edge(self, sign: str, flags: _Flags) -> int:
        if sign == "^":
            return TRUE if flags[0] else FALSE
        if sign == "$":
            return self._decisions.variable(0)
        word_follows = self._atom(charset.WORD, _DONE)
        return self._decisions.opposite(word_follows) if flags[1] else word_follows


def _is_anchored(node: Node) -> bool:
    """Whether it matches only at the start."""
    match node:
        case Edge("^"):
            return True
        case Sequence(parts):
            return any(map(_is_anchored, parts[:1]))
        case Alternation(parts):
            return all(map(_is_anchored, parts))
    return False


def _merged(classes: tuple[Ranges, ...], steps: list[list[int]], accepting: list[bool]) -> Automaton:
    """Merge states that cannot be distinguished, and then character classes."""
    blocks = [int(one) for one in accepting]
    count = len(set(blocks))
    while True:
        keys: dict[tuple[int, ...], int] = {}
        following = [
            keys.setdefault((block, *(blocks[one] for one in row)), len(keys))
            for block, row in zip(blocks, steps, strict=True)
        ]
        blocks = following
        if len(keys) == count:
            break
        count = len(keys)
    first = {block: state for state, block in reversed(list(enumerate(blocks)))}
    order = sorted(first, key=lambda block: first[block])
    names = {block: name for name, block in enumerate(order)}
    rows = [[names[blocks[one]] for one in steps[first[block]]] for block in order]
    columns: dict[tuple[int, ...], list[Ranges]] = {}
    for letter, ranges in enumerate(classes):
        columns.setdefault(tuple(row[letter] for row in rows), []).append(ranges)
    return Automaton(
        tuple(charset.union(ranges) for ranges in columns.values()),
        tuple(zip(*columns, strict=True)),
        tuple(accepting[first[block]] for block in order),
    )
