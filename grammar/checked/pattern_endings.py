"""Finds how a text that is written in part may end so that it matches patterns."""

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
    if machine is None:
        return None
    state = 0
    for char in begun:
        letter = _class_of(machine, char)
        if letter is None:
            return None  # a mark, or half a character
        state = machine.steps[state][letter]
    return _shortest(machine, state)


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
