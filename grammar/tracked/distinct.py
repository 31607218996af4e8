"""Knows which items of a set may still be written.

An item has one spelling, so it may not be written if its text was. Where values are few, a begun item may be
unable to become a new one: it is then as good as written. All of that follows from the items' own grammar,
read byte by byte.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from personae.grammar.backend import CompiledGrammar
from personae.grammar.bitmask import words_of

STOP = 256
"""The stop token of the vocabulary of bytes in which items are read."""
_WORDS = words_of(STOP + 1)
_ENDS = (b",", b"]", b" ", b"\t", b"\r", b"\n")


class Barred(NamedTuple):
    """A text that must not be written, or at which an item must not end."""

    text: bytes
    ends: bool


class ItemGrammar:
    """The grammar of one item. Thread-safe."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled

    @cached_property
    def unwritten(self) -> "Written":
        """The state of an empty set."""
        return Written(self, frozenset(), frozenset(), ())

    def spent(self, item: bytes, items: frozenset[bytes], dead: frozenset[bytes]) -> Iterator[bytes]:
        """The beginnings of `item`, longest first, that cannot become an item that is not in `items`. `dead`
        are those that are known already."""
        matcher = self._compiled.matcher()
        if matcher.feed(item) < len(item):
            return
        found = set(dead)
        mask = np.zeros((1, _WORDS), np.int32)
        for length in range(len(item), -1, -1):
            matcher.restore(length)
            matcher.fill(mask, 0)
            allowed = int.from_bytes(mask.tobytes(), "little")
            begun = item[:length]
            if allowed >> STOP & 1 and begun not in items:
                return
            following = (byte for byte in range(STOP) if allowed >> byte & 1)
            if not all(begun + bytes((byte,)) in found for byte in following):
                return
            found.add(begun)
            yield begun

    def last(self, dead: frozenset[bytes], items: frozenset[bytes]) -> bytes | None:
        """The only item that can still be written; None if there are several, or none."""
        matcher = self._compiled.matcher()
        mask = np.zeros((1, _WORDS), np.int32)
        begun = b""
        while begun not in dead:
            matcher.fill(mask, 0)
            allowed = int.from_bytes(mask.tobytes(), "little")
            ways = [byte for byte in range(STOP) if allowed >> byte & 1]
            ways = [byte for byte in ways if begun + bytes((byte,)) not in dead]
            if allowed >> STOP & 1 and begun not in items:
                return begun if not ways else None
            if len(ways) != 1 or not matcher.accept(ways[0]):
                return None
            begun += bytes((ways[0],))
        return None


class Written:
    """The items that a set has so far. Immutable."""

    def __init__(
        self,
        grammar: ItemGrammar,
        items: frozenset[bytes],
        dead: frozenset[bytes],
        barred: tuple[Barred, ...],
    ) -> None:
        self._grammar = grammar
        self.items = items
        self.dead = dead
        self._barred = barred  # sorted

    def with_item(self, item: bytes) -> "Written":
        """The state after one more item."""
        items = self.items | {item}
        spent = list(self._grammar.spent(item, items, self.dead))
        barred = list(self._barred)
        insort(barred, Barred(spent[-1], False) if spent else Barred(item, True))
        return Written(self._grammar, items, self.dead.union(spent), tuple(barred))

    @property
    def exhausted(self) -> bool:
        """Whether no other item can be written."""
        return b"" in self.dead

    @cached_property
    def last(self) -> bytes | None:
        """The only item that can still be written, if that is so."""
        return self._grammar.last(self.dead, self.items)

    def after(self, begun: bytes, longest: int) -> Iterator[bytes]:
        """The texts of at most `longest` bytes that must not be written after `begun`, a begun item."""
        size = len(begun)
        for place in range(bisect_left(self._barred, (begun,)), len(self._barred)):
            text, ends = self._barred[place]
            if not text.startswith(begun):
                break
            if len(text) - size > longest:
                continue
            if ends:
                yield from (text[size:] + end for end in _ENDS)
            else:
                yield text[size:]
        last = self.last
        if last is not None and last.startswith(begun):
            yield from (last[size:] + end for end in _ENDS if end != b"]")

    def allows(self, begun: bytes, since: int) -> bool:
        """Whether a begun item may be as it is. It was checked when it had `since` bytes."""
        return not self.dead or not any(begun[:size] in self.dead for size in range(since, len(begun) + 1))
