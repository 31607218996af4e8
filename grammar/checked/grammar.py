"""A looser grammar, whose answers are valid for the whole schemas of their parts."""

import msgspec

from personae.errors import GrammarError
from personae.grammar.budget.completion import PlannedCompletion
from personae.grammar.budget.distance_bound import guessed
from personae.grammar.budget.grammar import BudgetGrammar
from personae.grammar.budget.table import STOP
from personae.grammar.checked.answers import Answers
from personae.grammar.checked.matcher import CheckedMatcher
from personae.grammar.checked.texts import Raw, piece_of, raw
from personae.grammar.matcher import Matcher

_ANY_LENGTH = 2**31


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
