"""A best-first search for a completion, for when the greedy one (`planner.py`) finds none.

It follows several paths at once, the shortest first and, among those of the same length, the most promising.
States count as equal if they allow the same next bytes, so a repetition is left by anything that leads out of
it. The search asks only a matcher over bytes, so everything that it returns is allowed, in a grammar of any
kind.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import count

from personae.grammar.backend import BackendMatcher
from personae.grammar.budget.table import STOP, Piece

MOST_STATES = 4000  # of a search when a grammar is compiled: well below a second
_OF_A_LENGTH = 24  # states that are tried of each length
_ALIKE = 2  # of these, with the same mask
_FEW = 6  # up to this many bytes, all are tried
_MOST_TEXTS = 12  # texts tried in one state

_BYTES = (1 << 256) - 1
_FIRST = b'"}])>,;:/=\n '  # what ends something most often
_CLASSES = (b"0123456789", bytes(range(0x61, 0x7B)), bytes(range(0x41, 0x5B)), bytes(range(0x80, 0xF8)))
_OTHER = bytes(sorted({*range(0x20, 0x7F)} - {*_FIRST, *b"\\", *b"".join(_CLASSES)}))
_PRINTABLE = sum(1 << byte for byte in range(0x20, 0x7F))
_FREE = 40  # printable bytes; a state that allows more is within free text
_OPENING = frozenset(b"[{(")

Mask = Callable[[BackendMatcher], int]


def is_free(mask: int) -> bool:
    """Whether a state with this mask is within free text."""
    return (mask & _PRINTABLE).bit_count() > _FREE


class Search:
    """Searches with `texts` that an answer may have to write. `mask` gives what a matcher allows, as bits."""

    def __init__(self, texts: Iterable[Piece], mask: Mask) -> None:
        self._mask = mask
        self._texts: dict[int, list[Piece]] = defaultdict(list)
        self._single = 0
        for text in dict.fromkeys(filter(None, texts)):
            if len(text) > 1:
                self._texts[text[0]].append(text)
            else:
                self._single |= 1 << text[0]

    def find(self, matcher: BackendMatcher, limit: int, most: int = MOST_STATES) -> Piece | None:
        """A piece of at most `limit` that ends the answer. None if `most` states do not lead to one."""
        order = count()
        seen: dict[tuple[int, int], int] = defaultdict(int)
        looked: dict[int, int] = defaultdict(int)
        heap: list[tuple[int, int, int, int, BackendMatcher, Piece]] = []

        def add(one: BackendMatcher, piece: Piece, cost: int) -> None:
            if forced := one.forced():
                if one.feed(forced) < len(forced):
                    return
                piece = (*piece, *forced)
            mask = self._mask(one)
            if len(piece) > limit or not mask or seen[len(piece), mask] >= _ALIKE:
                return
            seen[len(piece), mask] += 1
            heappush(heap, (len(piece) + cost, cost, next(order), mask, one, piece))

        add(matcher.fork(), (), 0)
        while heap and most > 0:
            _, cost, _, mask, one, piece = heappop(heap)
            if mask >> STOP & 1:
                return piece
            if looked[len(piece)] >= _OF_A_LENGTH:
                continue
            looked[len(piece)] += 1
            free = is_free(mask)
            for more, dearer in self._ways(one, mask, piece):
                fork = one.fork()
                most -= 1
                if fork.feed(more) < len(more):
                    continue
                if free and more[0] in _OTHER and self._mask(fork) == mask:
                    continue  # still the same text
                add(fork, (*piece, *more), cost + dearer)
        return None

    def _ways(self, matcher: BackendMatcher, mask: int, piece: Piece) -> Iterator[tuple[Piece, int]]:
        """What may be written next, and how much worse it is than its length."""
        special = mask >> (STOP + 1)
        while special:
            lowest = special & -special
            yield (STOP + lowest.bit_length(),), 0
            special ^= lowest
        found = 0
        for first, texts in self._texts.items():
            for text in texts if mask >> first & 1 else ():
                if found < _MOST_TEXTS and matcher.follows(text) == len(text):
                    found += 1
                    yield text, -(3 * len(text) // 4)
        for byte in self._bytes(mask & _BYTES, piece):
            yield (byte,), 4 if byte in _OPENING else 0

    def _bytes(self, mask: int, piece: Piece) -> Iterable[int]:
        """All bytes if they are few. Otherwise those that are not letters or digits, and of letters and
        digits one of each kind that has not just been written."""
        if mask.bit_count() <= _FEW:
            return [byte for byte in range(256) if mask >> byte & 1]
        first = mask & self._single
        chosen = [byte for byte in range(128) if first >> byte & 1]
        chosen += [byte for byte in _FIRST if (mask & ~first) >> byte & 1]
        for group in (*_CLASSES, _OTHER):
            allowed = [byte for byte in group if (mask & ~first) >> byte & 1]
            fresh = [byte for byte in allowed if byte not in piece[-4:]]
            most = 1 if group is not _OTHER else len(_OTHER) if is_free(mask) else 4
            chosen += (fresh or allowed)[:most]
        return chosen or [(mask & -mask).bit_length() - 1] if mask else chosen
