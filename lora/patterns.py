"""Module patterns, as in PEFT's `rank_pattern` and `target_modules`, matched in bounded time.

PEFT gives a module the entry whose key matches `(.*\\.)?(KEY)$` against its name: the key is a regular
expression for the name or for a suffix of it that starts after a dot. Here the keys come from strangers, and
Python's `re` can take years over a short one, as `(a+)+b` shows. So whatever repeats, groups or alternates is
compiled to a small nondeterministic automaton and run without backtracking
(Thompson 1968, https://doi.org/10.1145/363347.363387). A lookahead is an automaton of its own, run where it
stands and once per position. Looking back and back references are refused.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from personae.errors import AdapterError

MAX_PATTERN = 128  # characters of one key
MAX_KEYS = 4096  # each is looked at for each module
MAX_GENERAL = 512  # characters of all keys that need the automaton, so that a load's time is bounded
MAX_REPEATS = 32  # that a counted repeat may stand for
MAX_STATES = 8192
MAX_WORK = 10_000_000  # states that one automaton looks at, for all names: some seconds

PLAIN = re.compile(r"\^?[A-Za-z0-9_.]*(?:\\\.[A-Za-z0-9_.]*)*\$?")  # nothing to choose: `re` is linear
TOKEN = re.compile(
    r"""  (?P<char> \[\^?(?:[A-Za-z0-9]-[A-Za-z0-9]|\\[dwDW.]|[A-Za-z0-9_.])+\]    # a set of characters
                  | \\[dwDW] | \\[^A-Za-z0-9\s] | \. | [A-Za-z0-9_\-/:])           # escape, any, literal
        | (?P<open> \(\?: | \((?!\?))
        | (?P<look> \(\?[=!])
        | (?P<mark> [)|^$] | \\b)
        | (?P<repeat> [*+?] | \{\d{1,4}(?:,\d{0,4})?\})\??                       # lazy or not: one language
    """,
    re.VERBOSE | re.ASCII,
)


@dataclass(slots=True)
class State:
    """One state: it consumes a character that `char` matches, or holds where `asserted`, or just goes on.

    asserted: an anchor, or "=" or "!" for a lookahead, whose first and last state `look` has.
    """

    char: re.Pattern[str] | None
    asserted: str
    to: list[int]
    look: tuple[int, int] = (0, 0)


class Automaton:
    """A compiled regular expression. Raises AdapterError (the field not named) when it is outside the
    language above, and when matching takes too long."""

    def __init__(self, pattern: str) -> None:
        self.states: list[State] = []
        self._work = 0
        self._looked: dict[tuple[int, int], bool] = {}
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(pattern):
            token = TOKEN.match(pattern, at)
            if token is None:
                raise AdapterError(f"{pattern[at : at + 8]!r} at character {at} is not supported")
            kind = str(token.lastgroup)
            self._tokens.append((kind, token[kind]))
            at = token.end()
        self._tokens.reverse()
        self.start, end = self._choice()
        if self._tokens:
            raise AdapterError("a closing parenthesis without an opening one")
        self.final = end

    def matches(self, name: str) -> bool:
        """Whether `name`, or a suffix of it that starts after a dot, is matched in full."""
        return self._run(name, [0, *(at + 1 for at, char in enumerate(name) if char == ".")])

    def matches_whole(self, name: str) -> bool:
        """Whether `name` is matched in full."""
        return self._run(name, [0])

    def _run(self, name: str, begins: Collection[int]) -> bool:
        self._looked.clear()
        return self._reaches(name, begins, self.start, self.final, whole=True)

    def _reaches(self, name: str, begins: Collection[int], start: int, final: int, *, whole: bool) -> bool:
        """Whether `final` is reached from `start`, begun at any of `begins`; `whole`: at the name's end."""
        alive: set[int] = set()
        for at in range(min(begins), len(name) + 1):
            if at in begins:
                alive.add(start)
            reached = self._closure(alive, name, at)
            if final in reached and (not whole or at == len(name)):
                return True
            if at < len(name):
                states = (self.states[i] for i in reached)
                alive = {state.to[0] for state in states if state.char and state.char.fullmatch(name[at])}
        return False

    def _closure(self, states: Iterable[int], name: str, at: int) -> set[int]:
        """The states reached without consuming a character."""
        reached: set[int] = set()
        stack = list(states)
        while stack:
            index = stack.pop()
            if index in reached or not self._holds(index, name, at):
                continue
            reached.add(index)
            if self.states[index].char is None:
                stack += self.states[index].to
        self._work += len(reached)
        if self._work > MAX_WORK:
            raise AdapterError("it takes too long to match; write out the modules' names")
        return reached

    def _holds(self, index: int, name: str, at: int) -> bool:
        state = self.states[index]
        match state.asserted:
            case "":
                return True
            case "^":
                return at == 0
            case "$":
                return at == len(name)
            case "\\b":
                return _in_word(name, at - 1) != _in_word(name, at)
        if (index, at) not in self._looked:
            found = self._reaches(name, [at], *state.look, whole=False)
            self._looked[index, at] = found == (state.asserted == "=")
        return self._looked[index, at]

    def _state(
        self,
        *to: int,
        char: re.Pattern[str] | None = None,
        asserted: str = "",
        look: tuple[int, int] = (0, 0),
    ) -> int:
        if len(self.states) == MAX_STATES:
            raise AdapterError("it is too large; write out the modules' names")
        self.states.append(State(char, asserted, list(to), look))
        return len(self.states) - 1

    def _choice(self) -> tuple[int, int]:
        """alternative { "|" alternative } -> its first and last state."""
        start, end = self._state(), self._state()
        while True:
            first, last = self._sequence()
            self.states[start].to.append(first)
            self.states[last].to.append(end)
            if not self._accept("|"):
                return start, end

    def _sequence(self) -> tuple[int, int]:
        start = end = self._state()
        while self._tokens and self._tokens[-1][1] not in ("|", ")"):
            first, last = self._repeated()
            self.states[end].to.append(first)
            end = last
        return start, end

    def _repeated(self) -> tuple[int, int]:
        anchored = self._tokens[-1][0] in ("mark", "look")
        begin = len(self.states)
        first, last = self._atom()
        if anchored or not self._tokens or self._tokens[-1][0] != "repeat":
            return first, last
        least, most = _times(self._tokens.pop()[1])
        once = [replace(state, to=[*state.to]) for state in self.states[begin:]]
        start = end = self._state()
        left: list[int] = []  # where the repetition may end
        for count in range(max(least, 1) if most is None else most):
            offset = len(self.states) - begin if count else 0
            for state in once if count else ():
                to, look = [to + offset for to in state.to], (state.look[0] + offset, state.look[1] + offset)
                self._state(*to, char=state.char, asserted=state.asserted, look=look)
            if count >= least:
                left.append(end)
            self.states[end].to.append(first + offset)
            end = last + offset
            if most is None and count == max(least, 1) - 1:
                self.states[end].to.append(first + offset)
        final = self._state()
        for index in (*left, end):
            self.states[index].to.append(final)
        return start, final

    def _atom(self) -> tuple[int, int]:
        kind, text = self._tokens.pop()
        if kind in ("open", "look"):
            inner = self._choice()
            if not self._accept(")"):
                raise AdapterError("an opening parenthesis without a closing one")
            if kind == "open":
                return inner
            end = self._state()
            return self._state(end, asserted=text[-1], look=inner), end
        if kind == "repeat":
            raise AdapterError(f"{text!r} has nothing to repeat")
        end = self._state()
        if kind == "mark":
            return self._state(end, asserted=text), end
        try:
            return self._state(end, char=re.compile(text)), end
        except re.error as error:
            raise AdapterError(f"{text!r}: {error}") from None

    def _accept(self, text: str) -> bool:
        found = bool(self._tokens) and self._tokens[-1][1] == text
        if found:
            self._tokens.pop()
        return found


def _in_word(name: str, at: int) -> bool:
    return 0 <= at < len(name) and (name[at].isalnum() or name[at] == "_")


def _times(mark: str) -> tuple[int, int | None]:
    """How often a repeat stands for at least, and at most."""
    if mark in "*+?":
        return int(mark == "+"), 1 if mark == "?" else None
    low, comma, high = mark[1:-1].partition(",")
    least, most = int(low), int(high or low) if high or not comma else None
    if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
        raise AdapterError(f"{mark!r}: a count is at most {MAX_REPEATS}, and in order")
    return least, most


class ModulePatterns:
    """A pattern field of an adapter's config: the first key that matches a module's name gives its value."""

    def __init__(self, field: str, values: Mapping[str, float]) -> None:
        if len(values) > MAX_KEYS:
            raise AdapterError(f"{field} has more than {MAX_KEYS} keys", param=field)
        self._entries: list[tuple[Callable[[str], object], float]] = []
        general = 0
        for key, value in values.items():
            where = f"{field}: key {key[:MAX_PATTERN]!r}"
            if len(key) > MAX_PATTERN:
                raise AdapterError(f"{where}... is longer than {MAX_PATTERN} characters", param=field)
            if PLAIN.fullmatch(key):
                self._entries.append((re.compile(rf"(?:.*\.)?(?:{key})$").match, value))
                continue
            general += len(key)
            if general > MAX_GENERAL:
                raise AdapterError(
                    f"{field}: its regular expressions have more than {MAX_GENERAL} characters; "
                    "write out the modules' names",
                    param=field,
                )
            try:
                self._entries.append((Automaton(key).matches, value))
            except AdapterError as error:
                raise AdapterError(f"{where}: {error.message}", param=field) from None

    def get(self, name: str, default: float) -> float:
        """The value of the first key that matches `name`, else `default`."""
        return next((value for matches, value in self._entries if matches(name)), default)
