"""A looser grammar, whose answers are valid for the whole schema."""

import msgspec

from personae.errors import GrammarError
from personae.grammar.backend import Matcher
from personae.grammar.budget.completion import PlannedCompletion
from personae.grammar.budget.distance_bound import guessed
from personae.grammar.budget.grammar import BudgetGrammar
from personae.grammar.budget.table import STOP
from personae.grammar.checked.matcher import CheckedMatcher
from personae.grammar.checked.search import Validator, repaired
from personae.grammar.schema.document import SCHEMA_PARAM

_ANY_LENGTH = 2**31
_MOST_TRIED = 6_000  # answers, until one is valid


class CheckedGrammar(BudgetGrammar):
    """As `loose`, but with the answers that `validator` accepts. `plan` is one of them."""

    def __init__(self, loose: BudgetGrammar, validator: Validator, plan: PlannedCompletion) -> None:
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
        self.validator = validator

    def matcher(self, budget: int | None = None) -> Matcher:
        """A new matcher at the start. Its answer is complete within `budget` tokens."""
        return CheckedMatcher(self.inner.matcher(), self, _ANY_LENGTH if budget is None else budget)


def checked(loose: BudgetGrammar, validator: Validator) -> CheckedGrammar:
    """The grammar of the valid answers. Raises GrammarError if none is found."""
    matcher, table = loose.bytewise(), loose.table
    first = bytes(byte for byte in loose.shortest_plan.piece if byte < STOP)
    begun = (first, *(text.encode() for text in validator.values))
    for answer in repaired(validator, b"", begun, _MOST_TRIED):
        if matcher.follows((*answer, STOP)) > len(answer) and (tokens := table.spell_shortest(answer)):
            return CheckedGrammar(loose, validator, PlannedCompletion(tuple(answer), tuple(tokens)))
    raise GrammarError("No answer to the schema was found.", param=SCHEMA_PARAM)
