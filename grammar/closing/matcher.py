"""A matcher that always closes: when its budget of tokens ends, the answer is complete.

While an answer has more tokens left than it can possibly need (`reach.py`), this is the backend's matcher and
an addition for every token. From there on it keeps a *plan*: a completion, found by the search in
`planner.py` in a grammar over bytes, and spelled in tokens, no more than are left. A step then allows
  - the first token of the plan, always;
  - plain text, where the answer is within a string or a text that plain text cannot move away from its end,
    and the plan leaves a token to spare;
  - of the other tokens that the grammar allows, the simplest for which a plan is found that fits.
So there is a plan after every token, whichever the model chooses, and the last one is empty.

What is allowed depends on the tokens accepted and the budget alone: a matcher that replays a log narrows as
the first one did.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from personae.grammar.backend import Matcher
from personae.grammar.closing.numbers import NumberGuard
from personae.grammar.closing.planner import Planner, open_brackets
from personae.grammar.closing.table import Piece, Words

if TYPE_CHECKING:
    from personae.grammar.closing.grammar import ClosingGrammar

_TRIED = 12  # tokens for which a plan of their own is looked for in one step
_RECENT = 512
_SEARCH = 16_384  # bytes of the longest plan


class Plan(NamedTuple):
    """A completion, as a piece and as the tokens that write it."""

    piece: Piece
    tokens: tuple[int, ...]


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
        if self._near:
            self._plan = grammar.shortest_plan

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        """Write the tokens allowed next; once terminated, the stop tokens."""
        self._inner.fill(bitmask, row)
        if self.terminated:
            return
        words = bitmask[row].numpy().view(np.uint32)
        if self._plan is not None:
            self._narrow(words, self._plan)
            return
        shorter = self._numbers.narrow(words)
        if shorter is not None:
            words[:] = shorter
        if self._grammar.reach.container and not self._near:
            opens = (self._left - 1 - self._bound) // self._grammar.reach.container
            if opens < self._grammar.table.most_opens:
                words &= self._grammar.table.at_most(opens)

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
        self._numbers.write(grammar.table.vocabulary.tokens[token])
        self._bound += grammar.reach.container * grammar.table.opens[token]
        if self._plan is None and not self._near:
            return
        plan, self._plan = self._plan, None
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

    def _narrow(self, words: Words, plan: Plan) -> None:
        """Take from `words` what no plan is known for."""
        table, reach = self._grammar.table, self._grammar.reach
        shorter = self._numbers.narrow(words)
        tried = words if shorter is None else shorter
        allowed = words & table.stops
        if plan.tokens:
            first = np.zeros_like(words)
            first[plan.tokens[0] // 32] = np.uint32(1 << plan.tokens[0] % 32)
            allowed |= first
        spare = self._left - 1 - len(plan.tokens)
        if spare >= 0 and reach.plain is not None and spare >= reach.plain:
            plain = table.plain(reach.barred)
            if not (plain & ~words).any():
                allowed |= plain
        if spare >= 0 or len(plan.tokens) > 1:
            self._try(tried, allowed, plan)
        words &= allowed

    def _try(self, words: Words, allowed: Words, plan: Plan) -> None:
        """Add to `allowed` those of the tokens in `words` that a plan is found for."""
        bytewise = self._sync()
        if bytewise is None:
            return
        table = self._grammar.table
        for token in table.in_order(words & ~allowed & ~table.blank, _TRIED):
            piece = table.piece(token)
            fork = bytewise.fork()
            recent = self._recent + bytes(byte for byte in piece if byte < 256)
            if fork.feed(piece) == len(piece) and self._after(fork, piece, recent, plan, self._left - 1):
                allowed[token // 32] |= np.uint32(1 << token % 32)


def _are_digits(old: Piece, piece: Piece) -> bool:
    return bool(old and piece) and all(byte in b"0123456789" for byte in (old[0] % 256, piece[-1] % 256))
