"""Knows which items of a set may still be written.

An item has one spelling, so it may not be written if its text was. Where values are few, a begun item may be
unable to become a new one: it is then as good as written. All of that follows from the items' own grammar,
read byte by byte.
"""

import json
from collections.abc import Iterator
from functools import cached_property
from itertools import permutations

import numpy as np
from rpds import HashTrieSet

from personae.grammar.backend import CompiledGrammar
from personae.grammar.bitmask import words_of
from personae.grammar.tracked.endings import Endings, Words, clear_tokens
from personae.grammar.tracked.items import MOST_FREE
from personae.grammar.tracked.seen import SeenItems

STOP = 256
"""The stop token of the vocabulary of bytes in which items are read."""
_WORDS = words_of(STOP + 1)
_ENDS = (b",", b"]", b" ", b"\t", b"\r", b"\n")
_DECODER = json.JSONDecoder()


class ItemGrammar:
    """The grammar of one item. `any_order`: whether its properties may come in any order. Thread-safe."""

    def __init__(self, compiled: CompiledGrammar, *, any_order: bool = False) -> None:
        self._compiled = compiled
        self._any_order = any_order

    @cached_property
    def unwritten(self) -> "Written":
        """The state of an empty set."""
        return Written(self, SeenItems(), HashTrieSet())

    def spellings(self, item: bytes) -> list[bytes]:
        """The texts of the same value: the item itself, and with its properties in another order."""
        if not self._any_order or not item.startswith(b"{"):
            return [item]
        try:
            members = _members(item)
        except (ValueError, IndexError):  # what is read may not be allowed
            return [item]
        if len(members) > MOST_FREE:
            return [item]
        orders = (b"{" + b",".join(order) + b"}" for order in permutations(members))
        return [one for one in orders if one == item or self._allows(one)]

    def _allows(self, item: bytes) -> bool:
        return self._compiled.matcher().follows((*item, STOP)) > len(item)

    def spent(self, item: bytes, items: "HashTrieSet[bytes]", dead: "HashTrieSet[bytes]") -> Iterator[bytes]:
        """The beginnings of `item`, longest first, that cannot become an item that is not in `items`. `dead`
        are those that are known already."""
        matcher = self._compiled.matcher()
        if matcher.feed(item) < len(item):
            return
        found = set[bytes]()
        mask = np.zeros((1, _WORDS), np.int32)
        for length in range(len(item), -1, -1):
            matcher.restore(length)
            matcher.fill(mask, 0)
            allowed = int.from_bytes(mask.tobytes(), "little")
            begun = item[:length]
            if allowed >> STOP & 1 and begun not in items:
                return
            following = (begun + bytes((byte,)) for byte in range(STOP) if allowed >> byte & 1)
            if not all(one in found or one in dead for one in following):
                return
            found.add(begun)
            yield begun

    def last(self, dead: "HashTrieSet[bytes]", items: "HashTrieSet[bytes]") -> bytes | None:
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

    def __init__(self, grammar: ItemGrammar, items: SeenItems, dead: "HashTrieSet[bytes]") -> None:
        self._grammar = grammar
        self._items = items
        self._dead = dead  # beginnings that can become no other item

    def __contains__(self, item: bytes) -> bool:
        return item in self._items.texts

    def __len__(self) -> int:
        return len(self._items.texts)

    def with_item(self, item: bytes, endings: Endings) -> "Written":
        """The state after one more item."""
        items, dead = self._items, self._dead
        spellings = self._grammar.spellings(item)
        for one in spellings:
            items = items.having(one)
        for one in spellings:
            spent = list(self._grammar.spent(one, items.texts, dead))
            if spent:
                items = items.barring(spent[-1:], endings.longest, endings.beginning)
            else:  # behind all of it, a large part of the vocabulary ends it: see `bar`
                texts = [one + end for end in _ENDS]
                items = items.barring(texts, endings.longest, endings.beginning, ends=1)
            dead = dead.update(spent)
        return Written(self._grammar, items, dead)

    @property
    def exhausted(self) -> bool:
        """Whether no other item can be written."""
        return b"" in self._dead

    @cached_property
    def last(self) -> bytes | None:
        """The only item that can still be written, if that is so."""
        return self._grammar.last(self._dead, self._items.texts)

    def bar(self, words: Words, begun: bytes, endings: Endings) -> None:
        """Bar the tokens after which `begun`, a begun item, would repeat another or be the last of all with
        others to follow."""
        if begun in self._items.texts:
            words &= endings.unended
        barred = self._items.barred.get(begun)
        if barred is not None:
            clear_tokens(words, barred)
        last = self.last
        if last is not None and last.startswith(begun):
            for end in _ENDS:
                if end != b"]":
                    clear_tokens(words, endings.beginning(last[len(begun) :] + end, not begun))

    def allows(self, begun: bytes, since: int) -> bool:
        """Whether a begun item may be as it is. It was checked when it had `since` bytes."""
        return not any(begun[:size] in self._dead for size in range(since, len(begun) + 1))


def _members(item: bytes) -> list[bytes]:
    """The members of an object that is written without blanks. Raises ValueError or IndexError for another
    text."""
    text, at, found = item.decode(), 1, []
    while text[at] != "}":
        _, named = _DECODER.raw_decode(text, at)
        _, end = _DECODER.raw_decode(text, named + 1)
        found.append(text[at:end].encode())
        at = end + (text[end] == ",")
    return found
