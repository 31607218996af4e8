"""A matcher that always closes: when its budget of tokens ends, the answer is complete.

While an answer has more tokens left than it can possibly need (`reach.py`), this is the backend's matcher and
an addition for every token. From there on it keeps a *plan*: a completion, found by the search in
`planner.py` in a grammar over bytes, and spelled in tokens, no more than are left. The mask is still the
grammar's, so that the model says what it would say; but the token that it chose is asked about before it is
taken. If no plan that fits is found for it, it is left out and the model chooses again; after a few such
objections only the first token of the plan is left, and what is sure. So there is a plan after every token,
whichever the model chooses, and the last one is empty.

Whether there is an objection depends on the tokens accepted and the budget alone: a matcher that replays a
log objects as the first one did.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from personae.grammar.backend import Matcher
from personae.grammar.bitmask import Bitmask
from personae.grammar.closing.numbers import NumberGuard
from personae.grammar.closing.planner import Planner, open_brackets
from personae.grammar.closing.table import Piece, Words

if TYPE_CHECKING:
    from personae.grammar.closing.grammar import ClosingGrammar

_OBJECTIONS = 8  # before a step is left no choice: each costs a search
_RECENT = 512
_SEARCH = 16_384  # bytes of the longest plan


class Plan(NamedTuple):
    """A completion, as a piece and as the tokens that write it."""

    piece: Piece
    tokens: tuple[int, ...]


class Ahead(NamedTuple):
    """Where a token leads that may be accepted next."""

    token: int
    bytewise: Matcher
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
        reach = grammar.reach
        self._left = self._budget
        self._accepted: list[int] = []
        self._numbers = NumberGuard(grammar.table)
        self._bound = reach.rest + reach.container + reach.lexeme
        self._bytewise: Matcher | None = None
        self._planner: Planner | None = None
        self._synced = 0  # how many of the accepted tokens the bytewise matcher has seen
        self._recent = b""
        self._plan: Plan | None = None
        self._ahead: Ahead | None = None  # the token that was asked about last
        self._objections = 0  # of this step
        self._is_text = False  # any plain text is allowed, and leads nowhere else
        if self._near:
            self._plan = grammar.shortest_plan

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write the tokens allowed next; once terminated, the stop tokens."""
        self._inner.fill(bitmask, row)
        if self.terminated:
            return
        words = bitmask[row].view(np.uint32)
        shorter = self._numbers.narrow(words)
        if shorter is not None:
            words[:] = shorter
        if self._plan is not None:
            if self._left < 1:
                words &= self._grammar.table.stops
            words |= self._first(self._plan)
            plain = self._plain
            self._is_text = bool(plain.any()) and not (plain & ~words).any()
            return
        if self._grammar.reach.container and not self._near:
            opens = (self._left - 1 - self._bound) // self._grammar.reach.container
            if opens < self._grammar.table.most_opens:
                words &= self._grammar.table.at_most(opens)

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
        if self._look_ahead(token, plan):
            return None
        self._objections += 1
        if self._objections > _OBJECTIONS:
            return ~(table.stops | self._first(plan))
        if self._is_text and table.holds(self._plain, token):
            return self._plain & ~self._first(plan)  # other text leads no nearer to the end
        return table.only(token)

    def accept(self, token: int) -> bool:
        """Advance by one token; False, and no change, if it is not allowed by the grammar."""
        if not self._inner.accept(token):
            return False
        self._accepted.append(token)
        if not self._inner.terminated:
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
        self._inner.rollback(count)
        accepted = self._accepted[: len(self._accepted) - count]
        self._begin()
        for token in accepted:
            self._accepted.append(token)
            self._advance(token)

    def fork(self) -> "ClosingMatcher":
        """A second matcher in the same state."""
        other = ClosingMatcher(self._inner.fork(), self._grammar, self._budget)
        other._left, other._bound, other._plan = self._left, self._bound, self._plan
        other._objections = self._objections
        other._accepted = self._accepted.copy()
        other._synced, other._recent = self._synced, self._recent
        other._numbers = self._numbers.fork()
        other._bytewise = self._bytewise and self._bytewise.fork()
        return other

    @property
    def terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        return self._inner.terminated

    def _advance(self, token: int) -> None:
        """The books after `token`."""
        grammar = self._grammar
        self._left -= 1
        self._objections = 0
        self._numbers.write(grammar.table.vocabulary.tokens[token])
        self._bound += grammar.reach.container * grammar.table.opens[token]
        if self._plan is None and not self._near:
            return
        plan, self._plan = self._plan, None
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.token == token:
            self._bytewise, self._recent, self._plan = ahead.bytewise, ahead.recent, ahead.plan
            self._synced = len(self._accepted)
        else:
            bytewise = self._sync()
            if bytewise is not None:
                self._plan = self._after(bytewise, grammar.table.piece(token), self._recent, plan, self._left)
        if self._plan is not None:
            self._relax(self._plan)

    def _relax(self, plan: Plan) -> None:
        """Stop watching if the answer is far from its end after all."""
        reach = self._grammar.reach
        self._bound = reach.rest + reach.lexeme + reach.container * open_brackets(plan.piece)
        if not self._near:
            self._plan = None

    @property
    def _plain(self) -> Words:
        """Plain text, if it does not lead away from the end by more than itself; else nothing."""
        reach, table = self._grammar.reach, self._grammar.table
        if reach.plain is None or reach.plain > 1:
            return table.only()
        return table.plain(reach.barred)

    @property
    def _near(self) -> bool:
        """Whether the end may come too soon after a token that opens one bracket."""
        return self._bound + self._grammar.reach.container > self._left - 1

    def _sync(self) -> Matcher | None:
        """The bytewise matcher where this one is; None if it cannot follow."""
        if self._bytewise is None:
            self._bytewise = self._grammar.bytewise()
        piece = [
            byte for token in self._accepted[self._synced :] for byte in self._grammar.table.piece(token)
        ]
        self._synced = len(self._accepted)
        self._recent = (self._recent + bytes(byte for byte in piece if byte < 256))[-_RECENT:]
        return self._bytewise if self._bytewise.feed(piece) == len(piece) else None

    def _after(
        self, bytewise: Matcher, piece: Piece, recent: bytes, before: Plan | None, left: int
    ) -> Plan | None:
        """A plan of at most `left` tokens where `piece` has led to, away from where `before` was the plan."""
        planner, table = self._search(), self._grammar.table
        old: Piece = ()
        if before is not None:
            old = before.piece
            if old[: len(piece)] == piece:
                rest = old[len(piece) :]
                spelled = tuple(table.piece(before.tokens[0])) == piece if before.tokens else False
                tokens = before.tokens[1:] if spelled else self._spell(rest, left)
                if tokens is not None and len(tokens) <= left:
                    return Plan(rest, tokens)
            elif (
                len(before.tokens) <= left
                and not _are_digits(old, piece)  # it would write the digit that the number needed before
                and planner.completes(bytewise, old)
            ):
                return before
        found = planner.plan(bytewise, recent, min(_SEARCH, 8 * left + 64), old)
        tokens = None if found is None else self._spell(found, left)
        if found is not None and tokens is not None and len(tokens) <= left:
            return Plan(found, tokens)
        if before is not None and len(before.tokens) <= left and planner.completes(bytewise, old):
            return before
        return None

    def _spell(self, piece: Piece, left: int) -> tuple[int, ...] | None:
        """Tokens that write `piece`, quickly, or the fewest if there are not enough left for that."""
        tokens = self._grammar.table.spell(piece)
        if tokens is not None and len(tokens) > left:
            tokens = self._grammar.table.spell_shortest(piece)
        return None if tokens is None else tuple(tokens)

    def _search(self) -> Planner:
        if self._planner is None:
            self._planner = self._grammar.planner()
        return self._planner

    def _first(self, plan: Plan) -> Words:
        """The plan's first token as a row of a bitmask; nothing if the plan is empty."""
        return self._grammar.table.only(*plan.tokens[:1])

    def _look_ahead(self, token: int, plan: Plan) -> bool:
        """Whether there is a plan after `token`; it is kept for when the token is accepted."""
        bytewise = self._sync()
        if bytewise is None:
            return False
        piece = self._grammar.table.piece(token)
        fork = bytewise.fork()
        recent = (self._recent + bytes(byte for byte in piece if byte < 256))[-_RECENT:]
        if fork.feed(piece) < len(piece):
            return False
        found = self._after(fork, piece, recent, plan, self._left - 1)
        if found is not None:
            self._ahead = Ahead(token, fork, recent, found)
        return found is not None


def _are_digits(old: Piece, piece: Piece) -> bool:
    return bool(old and piece) and all(byte in b"0123456789" for byte in (old[0] % 256, piece[-1] % 256))
