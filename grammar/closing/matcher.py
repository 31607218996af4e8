"""A matcher that always closes: when its budget of tokens ends, the answer is complete.

While an answer has more tokens left than it can possibly need (`reach.py`), this is the backend's matcher and
an addition for every token. From there on it keeps a *plan*: a completion, found by the search in
`planner.py` in a grammar over bytes, and spelled in tokens, no more than are left. The mask is still the
grammar's, so that the model says what it would say; but the token that it chose is asked about before it is
taken. If no plan that fits is found for it, it is left out and the model chooses again; after a few such
objections only the first token of the plan is left, and what is sure. So there is a plan after every token,
whichever the model chooses, and the last one is empty.

A backend that gives up on an answer, its automaton having grown too large, is left behind: the answer goes on
as the plan says, to its end.

Whether there is an objection depends on the tokens accepted and the budget alone: a matcher that replays a
log objects as the first one did.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from personae.grammar.backend import Matcher
from personae.grammar.bitmask import Bitmask
from personae.grammar.closing.numbers import NumberGuard
from personae.grammar.closing.plan import Plan, Speller, open_brackets
from personae.grammar.closing.planner import Planner
from personae.grammar.closing.table import Piece
from personae.grammar.closing.texts import Text, Words

if TYPE_CHECKING:
    from personae.grammar.closing.grammar import ClosingGrammar

_OBJECTIONS = 8  # before a step is left no choice: each costs a search
_RECENT = 512
_SEARCH = 16_384  # bytes of the longest plan
_QUOTE, _COLON = ord('"'), ord(":")
_NUMERIC = frozenset(b"0123456789+-.eE")
_BLANKS = frozenset(b" \t\r\n")


class Ahead(NamedTuple):
    """Where a token leads that may be accepted next; `bytewise` is None where nobody had to go there."""

    token: int
    bytewise: Matcher | None
    recent: bytes
    plan: Plan


class ClosingMatcher:
    """The state of one answer of at most `budget` tokens; a stop token after them is not counted."""

    def __init__(self, inner: Matcher, grammar: "ClosingGrammar", budget: int) -> None:
        self._inner = inner
        self._grammar = grammar
        self._budget = budget
        self._begin()

    @property
    def searched(self) -> bool:
        """Whether completions have been looked for."""
        return self._planner is not None

    def _begin(self) -> None:
        grammar = self._grammar
        self._left = self._budget
        self._accepted: list[int] = []
        self._numbers = NumberGuard(grammar.table)
        self._opened = 0
        self._bytewise: Matcher | None = None
        self._planner: Planner | None = None
        self._speller: Speller | None = None
        self._synced = 0  # how many of the accepted tokens the bytewise matcher has seen
        self._recent = b""
        self._plan: Plan | None = None
        self._ahead: Ahead | None = None  # the token that was asked about last
        self._objections = 0  # of this step
        self._is_text = False  # any plain text is allowed, and leads nowhere else
        self._harmless: Words | None = None  # what is sure to leave the plan as it is
        self._text: Text | None = None
        self._following = False  # the plan alone: the backend has given up
        self._stopped = False
        if self._near:
            self._plan = grammar.shortest_plan

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write the tokens allowed next; once terminated, the stop tokens."""
        words = bitmask[row].view(np.uint32)
        if self._text is not None:
            words[:] = self._text.words
        else:
            if not self._following:
                self._inner.fill(bitmask, row)
                self._following = self._inner.failed and self._follow()
            if self._following:
                words[:] = self._next() if not self.terminated else self._grammar.table.stops
                return
            if self.terminated:
                return
            if self._grammar.reach.texts:
                self._text = self._grammar.texts.at(words)
        shorter = self._numbers.narrow(words)
        if shorter is not None:
            words[:] = shorter
        table = self._grammar.table
        if self._plan is not None:
            if self._left < 1:
                words &= table.stops
            for token in self._plan.tokens[:1]:
                words[token // 32] |= np.uint32(1 << token % 32)
            self._look_at(words, self._plan)
            return
        container = self._grammar.reach.container
        if container and not self._near:
            opens = (self._left - 1 - self._bound) // container
            if opens < table.most_opens:
                words &= table.at_most(opens)

    def _look_at(self, words: Words, plan: Plan) -> None:
        """What the state that allows `words` says of tokens that may follow."""
        grammar, piece = self._grammar, plan.piece
        if grammar.reach.texts and self._ends_a_text(piece) and grammar.table.is_free(words):
            self._harmless = grammar.table.plain(b"")
        elif (
            grammar.reach.blanks
            and self._bears_blanks(piece)
            and grammar.table.holds(words, grammar.table.line_break)
        ):
            self._harmless = grammar.table.blank
        if self._left - len(plan.tokens) <= _OBJECTIONS:
            plain = grammar.plain
            self._is_text = bool(plain.any()) and not (plain & ~words).any()

    @staticmethod
    def _ends_a_text(piece: Piece) -> bool:
        """Whether it goes on with the quote after a string that is no name."""
        return piece[:1] == (_QUOTE,) and piece[1:2] != (_COLON,)

    def _bears_blanks(self, piece: Piece) -> bool:
        """Whether it may stand after a blank: what goes on with a number may not."""
        return not piece or not (piece[0] in _BLANKS or (self._numbers.begun and piece[0] in _NUMERIC))

    @property
    def asks(self) -> bool:
        """Whether the token that is chosen may meet with an objection."""
        return self._plan is not None and not self.terminated

    def objection(self, token: int) -> Words | None:
        """What is to be left out, as a row of a bitmask, because no completion in time is found after
        `token`, which `fill` allowed; None if there is one. A step's last objection leaves only what is sure.
        """
        plan, table = self._plan, self._grammar.table
        if plan is None or self._objections > _OBJECTIONS or table.holds(table.stops, token):
            return None
        if plan.tokens and token == plan.tokens[0]:
            return None
        harmless = self._harmless
        if harmless is not None and not table.holds(harmless, token):
            harmless = None
        if harmless is not None and len(plan.tokens) < self._left:
            self._ahead = Ahead(token, None, b"", plan)
            return None
        if harmless is None and self._look_ahead(token, plan):
            return None
        self._objections += 1
        if self._objections > _OBJECTIONS:
            return ~(table.stops | self._first(plan))
        if harmless is not None:
            return harmless & ~self._first(plan)  # any of them would take as long
        if self._is_text and table.holds(self._grammar.plain, token):
            return self._grammar.plain & ~self._first(plan)  # other text leads no nearer to the end
        return table.only(token)

    def accept(self, token: int) -> bool:
        """Advance by one token; False, and no change, if it is not allowed by the grammar."""
        if not self._following and not self._inner.accept(token):
            self._following = self._inner.failed and self._follow()
            if not self._following:
                return False
        if self._following:
            if self.terminated or not self._grammar.table.holds(self._next(), token):
                return False
            self._stopped = self._grammar.table.holds(self._grammar.table.stops, token)
        self._accepted.append(token)
        if self.terminated:
            self._text = None
        else:
            self._advance(token)
        return True

    def feed(self, tokens: Sequence[int]) -> int:
        """Accept as many of `tokens` as are allowed; how many that were."""
        for count, token in enumerate(tokens):
            if not self.accept(token):
                return count
        return len(tokens)

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        accepted = self._accepted[: len(self._accepted) - count]
        if self._following:
            self._inner = self._grammar.inner.matcher()
            self._inner.feed(accepted)
        else:
            self._inner.rollback(count)
        self._begin()
        for token in accepted:
            self._accepted.append(token)
            self._advance(token)

    def forced(self) -> bytes:
        """The text that the grammar alone allows, budget or not."""
        return b"" if self._following else self._inner.forced()

    def fork(self) -> "ClosingMatcher":
        """A second matcher in the same state."""
        other = ClosingMatcher(self._inner.fork(), self._grammar, self._budget)
        other._left, other._opened, other._plan = self._left, self._opened, self._plan
        other._objections = self._objections
        other._following, other._stopped = self._following, self._stopped
        other._accepted = self._accepted.copy()
        other._synced, other._recent = self._synced, self._recent
        other._numbers = self._numbers.fork()
        other._bytewise = self._bytewise and self._bytewise.fork()
        return other

    @property
    def terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        return self._stopped or self._inner.terminated

    @property
    def failed(self) -> bool:
        """Whether the backend has given up, and there is no plan either."""
        return self._inner.failed and not self._following

    def _follow(self) -> bool:
        """Have the plan for the rest of the answer; whether there is one."""
        if self._plan is None:
            bytewise = self._sync(len(self._accepted))
            if bytewise is not None:
                self._plan = self._found(bytewise, (), None, self._left)
        return self._plan is not None

    def _next(self) -> Words:
        """What the plan says alone, as a row of a bitmask."""
        assert self._plan is not None
        return self._first(self._plan) if self._plan.tokens else self._grammar.table.stops

    def _advance(self, token: int) -> None:
        """The books after `token`."""
        grammar = self._grammar
        self._left -= 1
        self._objections = 0
        self._is_text, self._harmless = False, None
        if self._text is not None:
            self._text = grammar.texts.after(self._text, token)
        self._numbers.write(grammar.table.vocabulary.tokens[token])
        self._opened += grammar.table.opens[token]
        if self._plan is None and not self._near:
            return
        plan, self._plan = self._plan, None
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.token != token:
            ahead = self._after(token, plan, self._left, len(self._accepted) - 1)
        if ahead is not None:
            self._plan = ahead.plan
            if self._following:
                return
            if ahead.bytewise is not None:
                self._bytewise, self._recent = ahead.bytewise, ahead.recent
                self._synced = len(self._accepted)
            self._relax(ahead.plan)

    def _relax(self, plan: Plan) -> None:
        """Stop watching if the answer is far from its end after all."""
        reach = self._grammar.reach
        if reach.rest + reach.lexeme + reach.container > self._left - 1:
            return  # whatever is open
        self._opened = open_brackets(plan.piece)
        if not self._near:
            self._plan = None

    @property
    def _bound(self) -> int:
        """How far from its end the answer is at most."""
        reach = self._grammar.reach
        return reach.rest + reach.lexeme + reach.container * max(self._opened - reach.roots, 0)

    @property
    def _near(self) -> bool:
        """Whether the end may come too soon after a token that opens one bracket."""
        return self._bound + self._grammar.reach.container > self._left - 1

    def _sync(self, count: int) -> Matcher | None:
        """The bytewise matcher after the first `count` tokens, no fewer than before; None if it cannot
        follow."""
        if self._bytewise is None:
            self._bytewise = self._grammar.bytewise()
        piece = [
            byte
            for token in self._accepted[self._synced : count]
            for byte in self._grammar.table.piece(token)
        ]
        self._synced = count
        self._recent = _with(self._recent, piece)
        return self._bytewise if self._bytewise.feed(piece) == len(piece) else None

    def _after(self, token: int, before: Plan | None, left: int, count: int) -> Ahead | None:
        """Where `token` leads after the first `count`, `before` being the plan there: with a plan of at most
        `left` tokens, or None."""
        table = self._grammar.table
        piece = table.piece(token)
        old: Piece = () if before is None else before.piece
        if before is not None and old[: len(piece)] == piece:
            found = self._spell(old[len(piece) :])
            if found is not None and len(found.tokens) <= left:
                return Ahead(token, None, b"", found)
        bytewise = self._sync(count)
        if bytewise is None:
            return None
        fork = bytewise.fork()
        if fork.feed(piece) < len(piece):
            return None
        plan = self._found(fork, piece, before, left)
        return None if plan is None else Ahead(token, fork, _with(self._recent, piece), plan)

    def _found(self, bytewise: Matcher, piece: Piece, before: Plan | None, left: int) -> Plan | None:
        """A plan of at most `left` tokens where `piece` has led to, away from where `before` was the plan."""
        planner = self._search()
        old: Piece = () if before is None else before.piece
        kept = before if before is not None and len(before.tokens) <= left else None
        if (
            kept is not None
            and not _are_digits(old, piece)  # it would write the digit that the number needed before
            and planner.completes(bytewise, old)
        ):
            return kept
        recent = _with(self._recent, piece)
        found = planner.plan(bytewise, recent, min(_SEARCH, 8 * left + 64), old)
        plan = None if found is None else self._spell(found)
        if plan is not None and len(plan.tokens) <= left:
            return plan
        if kept is not None and _are_digits(old, piece) and planner.completes(bytewise, old):
            return kept
        return None

    def _spell(self, piece: Piece) -> Plan | None:
        if self._speller is None:
            self._speller = Speller(self._grammar.table)
        return self._speller.plan(piece)

    def _search(self) -> Planner:
        if self._planner is None:
            self._planner = self._grammar.planner()
        return self._planner

    def _first(self, plan: Plan) -> Words:
        """The plan's first token as a row of a bitmask; nothing if the plan is empty."""
        return self._grammar.table.only(*plan.tokens[:1])

    def _look_ahead(self, token: int, plan: Plan) -> bool:
        """Whether there is a plan after `token`; it is kept for when the token is accepted."""
        self._ahead = self._after(token, plan, self._left - 1, len(self._accepted))
        return self._ahead is not None


def _with(recent: bytes, piece: Sequence[int]) -> bytes:
    return (recent + bytes(byte for byte in piece if byte < 256))[-_RECENT:]


def _are_digits(old: Piece, piece: Piece) -> bool:
    return bool(old and piece) and all(byte in b"0123456789" for byte in (old[0] % 256, piece[-1] % 256))
