"""A looser grammar and its matcher, whose answers are valid for schemas that no grammar enforces completely.

The matcher keeps a completion with which the answer is valid, from the first token to the last. The mask is
the looser grammar's. A token is accepted only if a completion is found after it with which the answer is
valid, else it is vetoed as one is for which the budget has no room. So the answer can always be finished, and
is valid then.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from personae.errors import GrammarError
from personae.grammar.backend import BackendMatcher
from personae.grammar.bitmask import Bitmask
from personae.grammar.budget.completion import CompletionPath, PlannedCompletion, path
from personae.grammar.budget.distance_bound import guessed
from personae.grammar.budget.grammar import BudgetGrammar
from personae.grammar.budget.matcher import BudgetMatcher
from personae.grammar.budget.table import STOP, Piece
from personae.grammar.checked.answers import Answers
from personae.grammar.checked.texts import Raw, piece_of, raw
from personae.grammar.matcher import Matcher, Snapshot

_ANY_LENGTH = 2**31
_LONGEST = 16_384  # bytes of a completion
_RECENT = 512


class CheckedGrammar(BudgetGrammar):
    """As `loose`, but with those of `answers`. `plan` is one of them."""

    def __init__(self, loose: BudgetGrammar, answers: Answers, plan: PlannedCompletion) -> None:
        # A completion is known from the first token on, and no text is taken not to matter.
        bound = msgspec.structs.replace(
            loose.analysis.bound or guessed(len(plan.tokens)),
            proven=False,
            plain=None,
            texts=False,
            blanks=False,
            endless=False,
        )
        analysis = msgspec.structs.replace(loose.analysis, bound=bound, plan=plan)
        super().__init__(analysis, loose.inner, loose.over_bytes, loose.table)
        self.answers = answers

    def matcher(self, budget: int | None = None) -> Matcher:
        """A new matcher at the start. Its answer is complete within `budget` tokens."""
        return CheckedMatcher(self.inner.matcher(), self, _ANY_LENGTH if budget is None else budget)


class CheckedMatcher(BudgetMatcher):
    """The state of one answer of at most `budget` tokens."""

    _grammar: CheckedGrammar

    def __init__(self, inner: BackendMatcher, grammar: CheckedGrammar, budget: int) -> None:
        super().__init__(inner, grammar, budget)
        self._read: tuple[int, Raw] = (0, "")  # how many tokens were accepted, and what they wrote

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write the tokens allowed next. Stop tokens are only if the answer is valid as it is."""
        super().fill(bitmask, row)
        stops = self._grammar.table.stops
        words = bitmask[row].view(np.uint32)
        if (words & stops).any() and not self._may_end():
            words &= ~stops

    def accept(self, token: int) -> bool:
        """Advance by one token. Returns False, and changes nothing, if no valid answer is found after it."""
        if not self.terminated and not self._following:
            if self._ends(token):
                if not self._may_end():
                    return False
            elif self._verified is None or self._verified.token != token:
                assert self._plan is not None
                self._verified = self._verify(token, self._plan)
                if self._verified is None:
                    return False
        return super().accept(token)

    def feed(self, tokens: Sequence[int]) -> int:
        """Accept as many of `tokens` as are allowed. Returns how many these were."""
        return next((count for count, token in enumerate(tokens) if not self.accept(token)), len(tokens))

    def restore(self, snapshot: Snapshot) -> None:
        """Undo what was accepted since."""
        super().restore(snapshot)
        self._read = (0, "")

    def _may_end(self) -> bool:
        """Whether the answer is valid as it is."""
        plan = self._plan
        ended = self.terminated or (plan is not None and not plan.count)
        return ended or self._grammar.answers.accepts(self._written())

    def _written(self) -> Raw:
        """The answer so far."""
        count, text = self._read
        piece = self._grammar.table.piece
        text += "".join(raw(piece(token)) for token in self._accepted[count:])
        self._read = len(self._accepted), text
        return text

    def _joins(self, token: int, rest: CompletionPath) -> bool:
        """Whether `rest` completes the answer after `token`, and it is valid."""
        if not super()._joins(token, rest):
            return False
        added = raw((*self._grammar.table.piece(token), *rest.piece))
        return self._grammar.answers.accepts(self._written() + added)

    def _found(self, piece: Piece, old: Piece, left: int) -> CompletionPath | None:
        """A plan of at most `left` tokens after `piece`. `old` was the plan before it."""
        fork = self._after(piece)
        if fork is None:
            return None
        for completion in self._completions(fork, self._written() + raw(piece), old):
            plan = path(self._grammar.table, completion, self._plan)
            if plan is not None and plan.count <= left:
                return plan
        return None

    def _completions(self, fork: BackendMatcher, written: Raw, old: Piece) -> Iterator[Piece]:
        """What makes a valid answer of what is `written`, after which `fork` is."""
        if self._planner is None:
            self._planner = self._grammar.planner()
        limit = min(_LONGEST, 8 * self._left + 64)
        recent = bytes(ord(one) for one in written[-_RECENT:] if ord(one) < STOP)
        begun = [self._planner.plan(fork, recent, limit, join) for join in (old, ())]

        def allows(completion: Raw) -> bool:
            return fork.follows(piece_of(completion)) == len(completion)

        given = [raw(piece) for piece in begun if piece is not None]
        for completion in self._grammar.answers.completions(written, given, allows):
            found = piece_of(completion)
            if fork.follows((*found, STOP)) > len(found):
                yield found


def checked(loose: BudgetGrammar, answers: Answers) -> CheckedGrammar:
    """The grammar of the valid answers. Raises GrammarError if none is found."""
    matcher, table = loose.bytewise(), loose.table

    def allows(begun: Raw) -> bool:
        return matcher.follows(piece_of(begun)) == len(begun)

    for answer in answers.completions("", [raw(loose.shortest_plan.piece)], allows):
        piece = piece_of(answer)
        tokens = table.spell_shortest(piece)
        if tokens is not None and matcher.follows((*piece, STOP)) > len(piece):
            return CheckedGrammar(loose, answers, PlannedCompletion(piece, tuple(tokens)))
    raise GrammarError("No valid answer was found.")
