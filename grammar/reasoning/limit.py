"""Limits reasoning: once the limit is spent, only what ends the reasoning may be written.

This narrows the masks of a grammar that contains the reasoning, and changes nothing after it. Of the tokens
that the grammar allows, it keeps those that write the next piece of the end, however they divide it. So an
end that consists of several tokens works like one that is a single token, and no character is left half
written.
"""

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from itertools import takewhile

import numpy as np

from personae.grammar.backend import BoundGrammar
from personae.grammar.bitmask import Bitmask
from personae.grammar.budget.string_masks import Words
from personae.grammar.budget.table import Piece, TokenTable
from personae.grammar.matcher import Lookahead, Matcher, Snapshot, Undecided
from personae.grammar.spec import ReasoningLimit

_BLANKS = frozenset(b" \t\r\n")
_CONTINUING = bytes(range(0x80, 0xC0))  # the bytes of a character after its first


class Tags:
    """What opens and what ends reasoning: as pieces, and the tokens that write them. Built once for each
    vocabulary and format, in some hundredths of a second for a large one."""

    def __init__(self, limit: ReasoningLimit, table: TokenTable) -> None:
        self.table = table
        self.open, self.close = table.piece_of(limit.open), table.piece_of(limit.close)
        self.text = table.piece_of(limit.text)
        stops = set(table.vocabulary.stop_ids)
        special = [token for token in table.vocabulary.special.values() if token not in stops]
        self._special = {table.piece(token)[0]: token for token in special}
        others = [table.piece_of(other) for other in (*limit.others, limit.text) if other]
        # Where the text that opens reasoning begins to differ from other openings of a message.
        self.fork = max((_shared(self.open, other) for other in others), default=0)
        firsts = {*self.open, *self.close}
        self._tokens = [
            (token, text)
            for token, text in enumerate(table.vocabulary.tokens)
            if text and text[0] in firsts and len(text) <= 64
        ]
        self.ends = [self._words(self._within(self.close[at:])) for at in range(len(self.close))]
        self.opens = [self._words(self._beyond(at)) for at in range(self.fork + 1)] if self.fork else []
        self.continuing = self._words(
            token
            for token, text in enumerate(table.vocabulary.tokens)
            if text and not text.strip(_CONTINUING)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return (len(self.ends) + len(self.opens) + 1) * 4 * self.table.words

    def _within(self, rest: Piece) -> list[int]:
        """The tokens that write a beginning of `rest`."""
        if rest[0] in self._special:
            return [self._special[rest[0]]]
        text = _text(rest)
        return [token for token, written in self._tokens if text.startswith(written)]

    def _beyond(self, at: int) -> list[int]:
        """The tokens with which a message becomes one of reasoning, after `at` elements of `open` are
        written."""
        rest, shared = self.open[at:], self.fork - at
        if not shared and rest[0] in self._special:
            return [self._special[rest[0]]]
        text = _text(rest)
        return [token for token, written in self._tokens if _shared(text, written) > shared]

    def _words(self, tokens: Iterable[int]) -> Words:
        bits = np.zeros(self.table.words * 32, np.uint8)
        bits[list(tokens)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of elements at the beginning that both share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _text(piece: Piece) -> bytes:
    """The bytes up to the first special token."""
    end = next((at for at, byte in enumerate(piece) if byte > 255), len(piece))
    return bytes(piece[:end])


class LimitedGrammar(BoundGrammar):
    """`inner` with the limit. Shared by all answers that it binds; thread-safe."""

    def __init__(self, inner: BoundGrammar, limit: ReasoningLimit, tags: Tags) -> None:
        self._inner = inner
        self._limit = limit
        self._tags = tags

    @property
    def nbytes(self) -> int:
        """Bytes held, including those of the inner grammar."""
        return self._inner.nbytes + self._tags.nbytes

    @property
    def shortest(self) -> int:
        """The number of tokens of an answer that is certain to be complete, without the stop token."""
        return self._inner.shortest

    def matcher(self, budget: int | None = None) -> Matcher:
        """A new matcher at the start of an answer that is complete within `budget` tokens."""
        return LimitedMatcher(self._inner.matcher(budget), self._tags, self._limit)


class _Phase(Enum):
    """Where an answer is."""

    BEFORE = auto()  # reasoning may be opened next
    WITHIN = auto()
    AFTER = auto()  # permanently


class LimitedMatcher(Matcher):
    """The state of one answer whose reasoning has at most `limit.tokens` tokens, followed by those that end
    it."""

    def __init__(self, inner: Matcher, tags: Tags, limit: ReasoningLimit) -> None:
        self._inner = inner
        self._tags = tags
        self._limit = limit
        self._phase = _Phase.WITHIN if limit.opened else _Phase.BEFORE
        self._spent = 0
        self._tail: list[int] = []  # what was written since the phase began, at most as long as the tags

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write the tokens allowed next. After the end, these are the stop tokens."""
        self._inner.fill(bitmask, row)
        if self._phase is _Phase.AFTER or self._spent < self._limit.tokens or self.terminated:
            return
        words = bitmask[row].view(np.uint32)
        for narrower in self._narrower(words):
            if narrower.any():
                words[:] = narrower
                return

    @property
    def verifies(self) -> bool:
        """Whether the chosen token may be vetoed."""
        return self._inner.verifies

    def veto(self, token: int) -> Words | Undecided | None:
        """What to exclude instead of accepting `token`; see `BudgetMatcher.veto`."""
        return self._inner.veto(token)

    def _narrower(self, words: Words) -> Iterable[Words]:
        """The first narrower mask that is not empty; otherwise `words` itself."""
        tags = self._tags
        if self._phase is _Phase.WITHIN:
            yield words & tags.ends[_begun(self._tail, tags.close)]
            yield words & tags.continuing
        elif tags.opens and self._limit.again:
            begun = _begun(self._tail, tags.open)
            if begun <= tags.fork:
                yield words & ~tags.opens[begun]

    def accept(self, token: int) -> bool:
        """Advance by one token. Returns False, and changes nothing, if the grammar does not allow it."""
        if not self._inner.accept(token):
            return False
        if self._phase is not _Phase.AFTER and not self._inner.terminated:
            self._write(token)
        return True

    def feed(self, tokens: Sequence[int]) -> int:
        """Accept tokens until one is not allowed. Returns how many were accepted."""
        return next((n for n, token in enumerate(tokens) if not self.accept(token)), len(tokens))

    def follows(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` the grammar would accept; a stop token may be the last."""
        return self._inner.follows(tokens)

    def snapshot(self) -> Snapshot:
        """The inner matcher's and the phase."""
        return self._inner.snapshot(), self._phase, self._spent, tuple(self._tail)

    def restore(self, snapshot: Snapshot) -> None:
        """Undo what was accepted since."""
        inner, self._phase, self._spent, tail = snapshot
        self._tail[:] = tail
        self._inner.restore(inner)

    def forced(self) -> bytes:
        """The only text that the inner grammar allows."""
        return self._inner.forced()

    def fork(self) -> "LimitedMatcher":
        """A second matcher in the same state."""
        other = LimitedMatcher(self._inner.fork(), self._tags, self._limit)
        other._phase, other._spent, other._tail = self._phase, self._spent, self._tail.copy()
        return other

    def unbudgeted(self) -> Lookahead | None:
        """See `BudgetMatcher.unbudgeted`. The limit is left out too."""
        return self._inner.unbudgeted()

    @property
    def failed(self) -> bool:
        """Whether the inner matcher is beyond its library's limits."""
        return self._inner.failed

    @property
    def terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        return self._inner.terminated

    def _write(self, token: int) -> None:
        within = self._phase is _Phase.WITHIN
        for byte in self._tags.table.piece(token):
            self._tail.append(byte)
            self._turn()
        if within and self._phase is _Phase.WITHIN:
            self._spent += 1

    def _turn(self) -> None:
        """Enter the next phase if the tail says so."""
        tags, tail, limit = self._tags, self._tail, self._limit
        if self._phase is _Phase.WITHIN:
            if _ends(tail, tags.close):
                self._enter(_Phase.BEFORE if limit.again else _Phase.AFTER)
        elif self._phase is _Phase.BEFORE:
            if limit.again and tags.text and _ends(tail, tags.text):
                self._enter(_Phase.AFTER)
            elif _ends(tail, tags.open):
                self._enter(_Phase.WITHIN)
            elif not limit.again:
                if len(tail) == 1 and tail[0] in _BLANKS:
                    tail.clear()
                elif tuple(tail) != tags.open[: len(tail)]:
                    self._enter(_Phase.AFTER)
        del tail[: -max(len(tags.open), len(tags.close), len(tags.text))]

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._tail.clear()


def _ends(tail: Sequence[int], tag: Piece) -> bool:
    return len(tail) >= len(tag) and tuple(tail[-len(tag) :]) == tag


def _begun(tail: Sequence[int], tag: Piece) -> int:
    """How much of `tag` the tail ends with."""
    longest = min(len(tag) - 1, len(tail))
    return next((count for count in range(longest, 0, -1) if tuple(tail[-count:]) == tag[:count]), 0)
