"""Module patterns, as in PEFT's `rank_pattern` and `alpha_pattern`, matched in linear time.

PEFT gives a module the entry whose key matches `(.*\\.)?(KEY)$` against its name: the key is a regular
expression for the name or for a suffix of it that starts after a dot. Here the keys come from strangers, and
Python's `re` can take years over a short one, as `(a+)+b` shows. So whatever repeats, groups or alternates is
compiled to a small nondeterministic automaton and run without backtracking
(Thompson 1968, https://doi.org/10.1145/363347.363387). What is no regular language (lookaround, back
references) and counted repeats are refused.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from personae.errors import AdapterError

MAX_PATTERN = 128  # characters of one key
MAX_GENERAL = 512  # characters of all keys that need the automaton, so that a load's time is bounded

PLAIN = re.compile(r"\^?[A-Za-z0-9_.]*(?:\\\.[A-Za-z0-9_.]*)*\$?")  # nothing to choose: `re` is linear
TOKEN = re.compile(
    r"""  (?P<char> \[\^?(?:[A-Za-z0-9]-[A-Za-z0-9]|\\[dwDW.]|[A-Za-z0-9_.])+\]    # a set of characters
                  | \\[dwDW] | \\[^A-Za-z0-9\s] | \. | [A-Za-z0-9_\-/:])           # escape, any, literal
        | (?P<open> \(\?: | \((?!\?))
        | (?P<mark> [)|^$])
        | (?P<repeat> [*+?])\??                                                 # lazy or not: one language
    """,
    re.VERBOSE | re.ASCII,
)


@dataclass(slots=True)
class State:
    """One state: it consumes a character that `char` matches, or asserts an anchor, or just goes on."""

    char: re.Pattern[str] | None
    anchor: str
    to: list[int]


class Automaton:
    """A compiled key. Raises AdapterError (the field not named) when it is outside the language above."""

    def __init__(self, pattern: str) -> None:
        self.states: list[State] = []
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
        alive: set[int] = set()
        for at in range(len(name) + 1):
            if at == 0 or name[at - 1] == ".":
                alive.add(self.start)
            reached = self._closure(alive, at == 0, at == len(name))
            if at == len(name):
                return self.final in reached
            states = (self.states[i] for i in reached)
            alive = {state.to[0] for state in states if state.char and state.char.fullmatch(name[at])}
        raise AssertionError("unreachable: the last position returns")

    def _closure(self, states: Iterable[int], first: bool, last: bool) -> set[int]:
        """The states reached without consuming a character."""
        reached: set[int] = set()
        stack = list(states)
        while stack:
            index = stack.pop()
            state = self.states[index]
            if index in reached or (state.anchor == "^" and not first) or (state.anchor == "$" and not last):
                continue
            reached.add(index)
            if state.char is None:
                stack += state.to
        return reached

    def _state(self, *to: int, char: re.Pattern[str] | None = None, anchor: str = "") -> int:
        self.states.append(State(char, anchor, list(to)))
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
        anchored = self._tokens[-1][0] == "mark"
        first, last = self._atom()
        if anchored or not self._tokens or self._tokens[-1][0] != "repeat":
            return first, last
        _, mark = self._tokens.pop()
        end = self._state()
        self.states[last].to.append(end)
        if mark in "*+":
            self.states[last].to.append(first)
        if mark in "*?":
            first = self._state(first, end)
        return first, end

    def _atom(self) -> tuple[int, int]:
        kind, text = self._tokens.pop()
        if kind == "open":
            inner = self._choice()
            if not self._accept(")"):
                raise AdapterError("an opening parenthesis without a closing one")
            return inner
        if kind == "repeat":
            raise AdapterError(f"{text!r} has nothing to repeat")
        end = self._state()
        if kind == "mark":
            return self._state(end, anchor=text), end
        try:
            return self._state(end, char=re.compile(text)), end
        except re.error as error:
            raise AdapterError(f"{text!r}: {error}") from None

    def _accept(self, text: str) -> bool:
        found = bool(self._tokens) and self._tokens[-1][1] == text
        if found:
            self._tokens.pop()
        return found


class ModulePatterns:
    """A pattern field of an adapter's config: the first key that matches a module's name gives its value."""

    def __init__(self, field: str, values: Mapping[str, float]) -> None:
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
