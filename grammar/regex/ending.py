"""Finds whether a text matches patterns, and how one that is written in part may end so that it does."""

from collections import deque
from functools import lru_cache

from personae.grammar.regex.automaton import Automaton, automaton
from personae.grammar.regex.charset import Ranges
from personae.grammar.regex.parse import NotRegular, parse

_REMEMBERED = 1024
_LIKED = "a0A"  # characters, if they may follow
_QUOTED = '"\\'


@lru_cache(_REMEMBERED)
def ending(patterns: tuple[str, ...], begun: str) -> str | None:
    """The shortest end of a text that begins as `begun`, in which all patterns of ECMA-262 are found. None if
    none is known."""
    machine = _machine(patterns)
    state = None if machine is None else _state_after(machine, begun)
    return None if machine is None or state is None else _shortest(machine, state)


def matches(pattern: str, text: str) -> bool | None:
    """Whether a pattern of ECMA-262 is found in a text. None if that is not known."""
    machine = _machine((pattern,))
    state = None if machine is None else _state_after(machine, text)
    return None if machine is None or state is None else machine.accepting[state]


def may_match(pattern: str, begun: str) -> bool:
    """Whether a text that begins so may match a pattern of ECMA-262. True if that is not known."""
    machine = _machine((pattern,))
    state = None if machine is None else _state_after(machine, begun)
    if machine is None or state is None or machine.accepting[state]:
        return True
    return any(after != state for after in machine.steps[state])  # there are no two dead states


def _state_after(machine: Automaton, text: str) -> int | None:
    """None after a mark, or half a character."""
    state = 0
    for char in text:
        letter = _class_of(machine, char)
        if letter is None:
            return None
        state = machine.steps[state][letter]
    return state


@lru_cache(_REMEMBERED)  # failures too: they take longest
def _machine(patterns: tuple[str, ...]) -> Automaton | None:
    try:
        return automaton(tuple(map(parse, patterns)))
    except NotRegular:
        return None


def _class_of(machine: Automaton, char: str) -> int | None:
    point = ord(char)
    for letter, ranges in enumerate(machine.classes):
        if any(low <= point <= high for low, high in ranges):
            return letter
    return None


def _shortest(machine: Automaton, state: int) -> str | None:
    texts = {state: ""}
    waiting = deque((state,))
    while waiting:
        one = waiting.popleft()
        if machine.accepting[one]:
            return texts[one]
        for letter, after in enumerate(machine.steps[one]):
            char = _shown(machine.classes[letter])
            if after not in texts and char:
                texts[after] = texts[one] + char
                waiting.append(after)
    return None


def _shown(ranges: Ranges) -> str:
    """A character of a class that JSON writes as itself; empty if it has none."""
    for char in _LIKED:
        if any(low <= ord(char) <= high for low, high in ranges):
            return char
    few = (map(chr, range(max(low, 0x20), min(high, low + 4) + 1)) for low, high in ranges)
    return next((char for part in few for char in part if char.isprintable() and char not in _QUOTED), "")
