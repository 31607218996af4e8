"""Finds short completions: a piece that ends the answer from where it is.

The search asks only the matcher of the bytewise grammar, one byte at a time, so everything that it returns is
allowed. It decides what to write next by the structure of JSON: it leaves strings, then containers, as soon
as they may be left, and takes the shortest value if it has a choice. It may miss the shortest completion. If
it finds none at all, the matcher above keeps the one that it has.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from personae.grammar.backend import BackendMatcher
from personae.grammar.bitmask import words_of
from personae.grammar.budget.search import MOST_STATES, Search, is_free
from personae.grammar.budget.table import STOP, Piece

_LOOKAHEAD = 160  # bytes of a value that are tried
_LEVELS = 2
_RECENT = 512
_MOST_TAILS = 4
_ENDS_TRIED = frozenset((4, 8, 16, 32, 64, 128, 256))  # lengths of a text at which ends of examples are tried
_MOST_ENDS = 256
_DEEP, _EVERY = 128, 1024  # brackets, checked after so many bytes
_FUEL = 2000  # bytes that are tried and not kept, in one search

_DIGITS_OF_NUMBERS = 24
_MOST_BEGUN = 10_000

_QUOTE = ord('"')
_LEAVING = 1 << STOP | 1 << _QUOTE
_CLOSERS = tuple(b"}]")
_VALUES = tuple(b'0123456789"ntf[{-')
_BLANKS = sum(1 << byte for byte in b" \t\r\n")
_BREAK = 1 << 0x0A
_ENDING = 1 << ord("]")
_BACKSLASH = 1 << 0x5C
_ENDS = sum(1 << byte for byte in b",}]")
_AFTER_NUMBERS = (*b",}]", STOP)
_BYTES = (1 << 256) - 1
_DIGITS = sum(1 << byte for byte in range(0x30, 0x3A))
_NUMERIC = _DIGITS | sum(1 << byte for byte in b".eE+-")
_SMALL = sum(1 << byte for byte in range(0x61, 0x7B))
_CAPITALS = sum(1 << byte for byte in range(0x41, 0x5B))
_CLASSES = (_BYTES & ~_DIGITS & ~_SMALL & ~_CAPITALS, _DIGITS, _SMALL, _CAPITALS)


class Hints:
    """What an answer may have to write: `words` as JSON strings without the first quote, and how a begun one
    continues; `ends`, which lead out of free text; `exits`, which end a repetition; `texts` of any other
    kind. With `words_first` the answer is a word, and not JSON. `values` are what its arrays may have to
    contain, and names, with the colon, that its objects may. `steps` are what its integers may have to be
    multiples of, each with one such multiple."""

    def __init__(
        self,
        words: Iterable[bytes] = (),
        ends: Iterable[Piece] = (),
        exits: Iterable[Piece] = (),
        *,
        words_first: bool = False,
        steps: Iterable[tuple[int, int]] = (),
        texts: Iterable[Piece] = (),
        values: Iterable[bytes] = (),
    ) -> None:
        self.steps = tuple(steps)
        self.values = tuple(values)
        self.texts = tuple(texts)
        self.ends = tuple(ends)
        self.exits = tuple(exits)
        self.words_first = words_first
        self.parts = tuple(islice(_tails(self.ends), _MOST_ENDS))
        useful = list(dict.fromkeys(words))
        self._useful = {text: rank for rank, text in enumerate(useful)}
        self._words = sorted(useful)
        self._after: dict[bytes, tuple[int, ...]] = {}  # the answers so far

    def after(self, begun: bytes) -> Iterable[int]:
        """The bytes that may follow, the most useful first."""
        found = self._after.get(begun)
        if found is None:
            if len(self._after) > _MOST_BEGUN:
                self._after.clear()
            found = self._after[begun] = tuple(self._find(begun))
        return found

    def _find(self, begun: bytes) -> Iterable[int]:
        first = bisect_left(self._words, begun)
        # No text has the byte 0xff.
        words = self._words[first : bisect_left(self._words, begun + b"\xff", first)]
        words = sorted((text for text in words if len(text) > len(begun)), key=self._useful.__getitem__)
        return dict.fromkeys(text[len(begun)] for text in words)


def _tails(ends: Sequence[Piece]) -> Iterator[Piece]:
    """The different texts that `ends` end with, the shortest first."""
    for length in range(1, max(map(len, ends), default=0) + 1):
        yield from dict.fromkeys(end[-length:] for end in ends if len(end) >= length)


class Planner:
    """Searches for one answer at a time. Not thread-safe; `hints` are shared. `size`: bytewise ids.

    `varied`: where the search goes round in circles, it tries first what was written least, not what is
    shortest.
    """

    def __init__(self, hints: Hints, size: int, *, varied: bool = False) -> None:
        self._hints = hints
        self._varied = varied
        self._search: Search | None = None
        self._fuel = 0
        self._bitmask = np.zeros((1, words_of(size)), np.int32)

    def mask(self, matcher: BackendMatcher) -> int:
        """The ids allowed next, as bits of one number."""
        matcher.fill(self._bitmask, 0)
        return int.from_bytes(self._bitmask.tobytes(), "little")

    def plan(
        self, matcher: BackendMatcher, recent: bytes, limit: int, join: Sequence[int] = ()
    ) -> Piece | None:
        """A piece of at most `limit` that ends the answer. None if none is found.

        `recent` is the end of what has been written. `join` ended the answer a moment ago; its tails are
        tried where a value ends.
        """
        cuts = [index for index, byte in enumerate(join) if 1 << byte & _ENDS][:_MOST_TAILS]
        tails = [tuple(join[index:]) for index in cuts]
        self._fuel = _FUEL
        found = self._run(matcher.fork(), recent[-_RECENT:], limit, None, tails=tails)
        return None if found is None else tuple(found)

    def search(self, matcher: BackendMatcher, limit: int, most: int = MOST_STATES) -> Piece | None:
        """As `plan`, with the slower search, which finds more."""
        if self._search is None:
            hints = self._hints
            self._search = Search((*hints.exits, *hints.ends, *hints.texts, *hints.parts), self.mask)
        return self._search.find(matcher, limit, most)

    def _run(
        self,
        matcher: BackendMatcher,
        recent: bytes,
        limit: int,
        value: "_Value | None",
        level: int = 0,
        tails: Sequence[Piece] = (),
    ) -> list[int] | None:
        """Continue to the end of the answer, or of the begun `value`. The matcher is used up."""
        out: list[int] = []
        text = bytearray(recent)
        looked = _EVERY
        while len(out) <= limit:
            if len(out) >= looked and not self._varied:
                looked += _EVERY
                if _depth(text) > _DEEP:
                    return None
            if (value is None or not value.ended) and (forced := matcher.forced()):
                forced = forced if value is None else value.follow(forced)
                if matcher.feed(forced) != len(forced):
                    return None
                out += forced
                text += forced
                continue
            mask = self.mask(matcher)
            self._fuel -= value is not None
            if self._fuel < 0 and value is not None:
                return None
            ended = bool(mask >> STOP & 1)
            if ended if value is None else value.ended and (ended or mask & _ENDS):
                return out
            if tails and mask & _ENDS and not is_free(mask):
                for tail in tails:
                    if mask >> tail[0] & 1 and matcher.follows((*tail, STOP)) > len(tail):
                        return out + list(tail)
            chosen = self._choose(matcher, mask, text, limit - len(out), level)
            if not chosen or matcher.feed(chosen) != len(chosen):
                return None
            out += chosen
            for byte in chosen:
                text.append(byte if byte < STOP else 0)
                if value is not None:
                    value.write(byte)
        return None

    def _choose(
        self, matcher: BackendMatcher, mask: int, text: bytearray, limit: int, level: int
    ) -> Sequence[int]:
        """The piece to write next; empty if there is none."""
        free = is_free(mask)
        for piece in () if free or mask & (mask - 1) == 0 else self._hints.exits:
            if mask >> piece[0] & 1 and matcher.fork().feed(piece) == len(piece):
                return piece
        special = mask >> (STOP + 1)
        numeric = not free and text and text[-1] in b"0123456789" and mask & _DIGITS
        if special and (free or numeric or not mask & _BYTES & ~_BLANKS):
            return (STOP + (special & -special).bit_length(),)
        if mask & (mask - 1) == 0:
            return (mask.bit_length() - 1,) if mask else ()
        if self._hints.words_first and not free:
            return self._letter(matcher, mask, text)
        if self._hints.steps and mask & _DIGITS and not free and not mask & _ENDS:
            # Of an array that must contain something, any other multiples lead nowhere.
            number = self._counted(matcher, text) or self._multiple(matcher, text)
            if number:
                return number
        if free:
            return self._leave(matcher, mask, text)
        # A line break is never within a string. Except for the last blanks, it may be between any two tokens.
        between = not text or mask & _BREAK or text[-1] in b"\n\r\t" or _is_indented(text)
        whole, mask = mask, mask & ~_BLANKS or mask
        if between and (not text or text[-1] in b"{[,: \n\r\t"):
            for byte in _CLOSERS:
                if mask >> byte & 1:
                    return (byte,)
            return self._value(matcher, mask, text, limit, level)
        if mask >> _QUOTE & 1:
            return (_QUOTE,)
        begun = bytes(text[text.rfind(b'"') + 1 :])
        hinted = self._hinted(mask, begun, text) if begun else ()
        if hinted:
            return hinted
        for byte in (*_CLOSERS, *b":,"):
            if mask >> byte & 1:
                return (byte,)
        return self._letter(matcher, whole, text)

    def _multiple(self, matcher: BackendMatcher, text: bytearray) -> Sequence[int]:
        """Digits that make a multiple of the begun number, or a number if none has begun."""
        begun = len(text)
        while begun and text[begun - 1] in b"0123456789" and len(text) - begun < _DIGITS_OF_NUMBERS:
            begun -= 1
        digits = bytes(text[begun:])
        for step, first in self._hints.steps:
            pieces = [str(first).encode()]
            if digits:
                tails = ((width, -int(digits) * 10**width % step) for width in range(1, len(str(step)) + 1))
                pieces = [str(tail).zfill(width).encode() for width, tail in tails if tail < 10**width]
            for piece in pieces:
                if any(matcher.follows((*piece, end)) > len(piece) for end in _AFTER_NUMBERS):
                    return piece
        return ()

    def _leave(self, matcher: BackendMatcher, mask: int, text: bytearray) -> Sequence[int]:
        """Leave free text: by a quote if it is a JSON string, or by a text that ends it."""
        if mask >> _QUOTE & 1 and not self._stays_free(matcher, mask, (_QUOTE,)):
            return (_QUOTE,)
        for end in self._hints.ends:
            if not self._stays_free(matcher, mask, end):
                return end
        return self._letter(matcher, mask, text)

    def _stays_free(self, matcher: BackendMatcher, before: int, piece: Sequence[int]) -> bool:
        fork = matcher.fork()
        if fork.feed(piece) != len(piece):
            return True
        mask = self.mask(fork)
        return is_free(mask) and not mask & ~before & _LEAVING

    def _value(
        self, matcher: BackendMatcher, mask: int, text: bytearray, limit: int, level: int
    ) -> Sequence[int]:
        """The shortest value, or its beginning."""
        counted = self._counted(matcher, text)
        if counted:
            return counted
        starts = [byte for byte in _VALUES if mask >> byte & 1]
        digits = [byte for byte in starts if byte in b"0123456789"]
        starts = digits[:2] + starts[len(digits) :]
        if len(starts) < 2 or level >= _LEVELS or self._fuel < 0:
            return starts[:1] or self._letter(matcher, mask, text)
        best: list[int] | None = None
        for byte in starts:
            most = min(limit, _LOOKAHEAD) if best is None else len(best) - 2
            fork = matcher.fork()
            if most >= 0 and fork.feed((byte,)):
                rest = self._run(fork, bytes(text) + bytes((byte,)), most, _Value(byte), level + 1)
                if rest is not None:
                    best = [byte, *rest]
                if best is not None and len(best) == 1:
                    break
        return best or starts[:1]

    def _counted(self, matcher: BackendMatcher, text: bytearray) -> Sequence[int]:
        """What an array or object may have to contain, without which it would go on for ever: a name, a value
        after which an array may end, or each in turn."""
        fitting = []
        before = text.rstrip(b" \t\r\n")[-1:] if self._hints.values else b""
        values = self._hints.values if before in (b"[", b"{", b",") else ()
        # What is required elsewhere may be written here as any other name and lead nowhere, so try it once at
        # most.
        for value in sorted(values, key=text.count) if len(values) > 1 else values:
            if matcher.follows(value) < len(value):
                continue
            if value.endswith(b'":'):
                return value
            fork = matcher.fork()
            fork.feed(value)
            if self.mask(fork) & _ENDING:
                return value
            fitting.append(value)
        return fitting[text.count(b",") % len(fitting)] if fitting else ()

    def _letter(self, matcher: BackendMatcher, mask: int, text: bytearray) -> Sequence[int]:
        """Within a name, a listed value, a number or a pattern: what leads to its end."""
        begun = bytes(text if self._hints.words_first else text[text.rfind(b'"') + 1 :])
        found = self._hinted(mask, begun, text)
        if not found and len(begun) in _ENDS_TRIED:
            found = self._end(matcher, mask)
        if found:
            return found
        all_allowed = mask & _BYTES
        allowed = all_allowed & ~_BLANKS & ~_BACKSLASH or all_allowed
        if not allowed:
            return ()
        if text[-1:].isdigit() and allowed & _DIGITS:  # a number continues, unless something else may follow
            ends = allowed & ~_NUMERIC or all_allowed & _BLANKS
            if ends:
                return ((ends & -ends).bit_length() - 1,)
        # What repeats rarely leads out of a repetition.
        recent, last = 0, _CLASSES[0]
        for byte in text[-4:]:
            recent |= 1 << byte
            last = next(group for group in _CLASSES if group >> byte & 1)
        for group in (*(group for group in _CLASSES if group != last), last):
            best = allowed & group & ~recent
            if best:
                return ((best & -best).bit_length() - 1,)
        return ((allowed & -allowed).bit_length() - 1,)

    def _end(self, matcher: BackendMatcher, mask: int) -> Sequence[int]:
        """The end of an example of a pattern after which the text may end."""
        for part in self._hints.parts:
            if mask >> part[0] & 1:
                fork = matcher.fork()
                if fork.feed(part) == len(part) and self.mask(fork) & (1 << _QUOTE | 1 << STOP):
                    return part
        return ()

    def _hinted(self, mask: int, begun: bytes, text: bytearray) -> Sequence[int]:
        found = [byte for byte in self._hints.after(begun) if mask >> byte & 1]
        if self._varied and len(found) > 1:
            found.sort(key=lambda byte: text.count(b'"' + begun + bytes((byte,))))
        return found[:1]


class _Value:
    """Finds the end of a JSON value whose first byte is known."""

    def __init__(self, first: int) -> None:
        self._depth = int(first in b"[{")
        self._quoted = first == _QUOTE
        self._escaped = False

    @property
    def ended(self) -> bool:
        return not self._depth and not self._quoted

    def follow(self, text: bytes) -> bytes:
        """Write `text` as far as it belongs to the value. Returns that part."""
        for count, byte in enumerate(text, 1):
            self.write(byte)
            if self.ended:
                return text[:count]
        return text

    def write(self, byte: int) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quoted and byte == 0x5C:
            self._escaped = True
        elif byte == _QUOTE:
            self._quoted = not self._quoted
        elif not self._quoted and byte < STOP:
            self._depth += (byte in b"{[") - (byte in b"}]")


def _is_indented(text: bytearray) -> bool:
    """Whether the text ends with a line break and blanks."""
    return text[-1:] == b" " and text[len(text.rstrip(b" ")) - 1 :][:1] in (
        bytearray(b"\n"),
        bytearray(b"\t"),
    )


def _depth(text: bytearray) -> int:
    return text.count(b"{") + text.count(b"[") - text.count(b"}") - text.count(b"]")
