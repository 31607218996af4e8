"""Writes an automaton as a regular expression that ECMA-262, Python and Rust read the same way."""

from collections import defaultdict

from personae.grammar.regex import charset
from personae.grammar.regex.automaton import Automaton
from personae.grammar.regex.charset import Ranges
from personae.grammar.regex.parse import NotRegular

_MOST = 12_000  # characters
_EMPTY = ""


def expression(machine: Automaton) -> str:
    """An expression without anchors for the texts that the automaton accepts; there must be at least one.
    Raises NotRegular if it would be too long.

    Eliminates one state after the other, beginning with those that lengthen the rest least.
    """
    start, end = -1, -2
    edges = _edges(machine)
    into: dict[int, set[int]] = defaultdict(set)
    out: dict[int, dict[int, str]] = defaultdict(dict)

    def put(source: int, target: int, text: str) -> None:
        out[source][target] = f"{out[source][target]}|{text}" if target in out[source] else text
        into[target].add(source)

    for (source, target), ranges in edges.items():
        put(source, target, charset.written(ranges))
    put(start, 0, _EMPTY)
    alive = {one for one in out if one >= 0} | {one for one in into if one >= 0}
    for state in alive:
        if machine.accepting[state]:
            put(state, end, _EMPTY)

    def weight(state: int) -> int:
        incoming = [len(out[one][state]) for one in into[state] if one != state]
        outgoing = [len(text) for target, text in out[state].items() if target != state]
        loop = len(out[state].get(state, ""))
        return (
            sum(incoming) * (len(outgoing) - 1)
            + sum(outgoing) * (len(incoming) - 1)
            + loop * (len(incoming) * len(outgoing) - 1)
        )

    weights = {state: weight(state) for state in alive}
    while alive:
        state = min(alive, key=weights.__getitem__)
        alive.discard(state)
        beside = (into[state] | out[state].keys()) & alive
        loop = out[state].pop(state, None)
        again = "" if not loop else f"{_one(loop)}*"
        for source in into.pop(state) - {state}:
            before = out[source].pop(state)
            for target, behind in out[state].items():
                put(source, target, _grouped(before) + again + _grouped(behind))
        for target in out.pop(state):
            into[target].discard(state)
        if sum(len(text) for row in out.values() for text in row.values()) > _MOST:
            raise NotRegular("its expression would be too long")
        weights |= {one: weight(one) for one in beside}
    return out[start][end]


def _edges(machine: Automaton) -> dict[tuple[int, int], Ranges]:
    """The characters that lead from one state to another from which the text can still be accepted."""
    before: dict[int, set[int]] = defaultdict(set)
    for source, row in enumerate(machine.steps):
        for target in row:
            before[target].add(source)
    live = {state for state, accepts in enumerate(machine.accepting) if accepts}
    unseen = list(live)
    while unseen:
        for one in before[unseen.pop()] - live:
            live.add(one)
            unseen.append(one)
    parts: dict[tuple[int, int], list[Ranges]] = defaultdict(list)
    for source in live:
        for letter, target in enumerate(machine.steps[source]):
            if target in live:
                parts[source, target].append(machine.classes[letter])
    return {edge: charset.union(ranges) for edge, ranges in parts.items()}


def _grouped(text: str) -> str:
    """As one part of a sequence."""
    return f"(?:{text})" if _has_choice(text) else text


def _one(text: str) -> str:
    """As what is repeated."""
    if len(text) == 1 or (text[0] == "\\" and len(text) == (4 if text[1] == "x" else 2)):
        return text
    if text[0] == "[" and text.find("]") == len(text) - 1 and "\\]" not in text:
        return text
    return f"(?:{text})"


def _has_choice(text: str) -> bool:
    depth, place = 0, 0
    while place < len(text):
        sign = text[place]
        if sign == "\\":
            place += 1
        elif sign == "[":
            while text[place] != "]":
                place += 2 if text[place] == "\\" else 1
        elif sign in "()":
            depth += 1 if sign == "(" else -1
        elif sign == "|" and not depth:
            return True
        place += 1
    return False
