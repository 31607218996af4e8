"""What the plan alone says about the tokens that may follow in a state, without asking the grammar."""

from typing import TYPE_CHECKING

import numpy as np

from personae.grammar.budget.completion import CompletionPath
from personae.grammar.budget.fillers import BLANKS, Filler
from personae.grammar.budget.string_masks import Words

if TYPE_CHECKING:
    from personae.grammar.budget.grammar import BudgetGrammar

_QUOTE, _COLON = ord('"'), ord(":")
_NUMERIC = frozenset(b"0123456789+-.eE")
_LONGEST = 64  # bytes; longer tokens are not compared with the plan


class TokenClassifier:
    """For the state that allows `words` and in which `plan` completes the answer. `number`: the text may end
    with a number. The content of a string, and what is between two tokens of JSON, is taken not to matter if
    the schema says so (`DistanceBound.texts`, `DistanceBound.blanks`)."""

    __slots__ = ("_begins", "_filler", "_grammar", "_number", "_plain", "_plan")

    def __init__(self, grammar: "BudgetGrammar", plan: CompletionPath, words: Words, *, number: bool) -> None:
        self._grammar = grammar
        self._plan = plan
        self._begins = begins = plan.begins(_LONGEST)
        table, bound = grammar.table, grammar.bound
        numeric = begins[:1] and begins[0] in _NUMERIC
        self._filler: Filler | None = None
        self._number = False
        if begins[:1] == b'"' and begins[1:2] != b":" and bound.texts and table.is_free(words):
            self._filler = table.text
        elif bound.blanks and table.holds(words, table.line_break):
            if not ((begins and begins[0] in BLANKS) or (number and numeric)):
                self._filler = table.blanks
            self._number = number and not numeric and bound.texts
        self._plain = self._filler is not table.text and grammar.is_plain(words)

    def written(self, token: int) -> int | None:
        """How much of the plan `token` writes, after filler or not. None if it writes something else."""
        table, filler, begins = self._grammar.table, self._filler, self._begins
        text: bytes | None = table.vocabulary.tokens[token]
        if text and begins.startswith(text):
            return len(text)
        if filler is None:
            return None
        if table.holds(filler.tokens, token):
            return 0
        text = filler.behind(text) if text else None
        return len(text) if text and begins.startswith(text) else None

    def narrow(self, words: Words) -> None:
        """Exclude the tokens that take longer than the plan, when the plan needs all tokens that are left."""
        table, filler, plan = self._grammar.table, self._filler, self._plan
        if not plan.count:
            words &= table.stops
            return
        if filler is not None:
            words &= filler.others
        if self._number:
            words &= table.not_numeric
        for length in plan.no_nearer(min(plan.length, len(self._begins) + 1)):
            begun = self._begins[:length]
            token = table.token(begun)
            if token is not None:
                words[token // 32] &= ~np.uint32(1 << token % 32)
            without = filler.without(begun) if filler is not None else None
            if without is not None:
                words &= without

    def as_long(self, token: int) -> Words:
        """The tokens that take as long as `token`, which takes too long."""
        grammar = self._grammar
        if self._plain and grammar.table.holds(grammar.plain, token):
            return grammar.plain  # other text leads no nearer to the end
        text = grammar.table.vocabulary.tokens[token]
        alike = self._filler.alike(token, text) if self._filler is not None and text else None
        return grammar.table.only(token) if alike is None else alike
