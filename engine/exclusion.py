"""What a sequence may not say: tokens that are not among its allowed ones, and what completes a bad word.

A bad word is a sequence of token ids; its last one is left out wherever the others have just been emitted.
The prompt does not count, as in vLLM. All words that have begun are followed, one inside of another, too.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog
from personae.grammar.bitmask import Bitmask, leave_out, words_of


def excludes(params: SamplingParams) -> bool:
    """Whether anything is left out."""
    return bool(params.allowed_tokens or params.bad_words_token_ids)


@dataclass(slots=True)
class _Begun:
    """A beginning that bad words share: what completes one of them, and how others go on."""

    last: list[int] = field(default_factory=list)
    longer: dict[int, "_Begun"] = field(default_factory=dict)


@lru_cache(64)
def _none_begun(words: tuple[tuple[int, ...], ...]) -> _Begun:
    """Where nothing of a word has been said yet; siblings share it."""
    none = _Begun()
    for *first, last in words:
        begun = none
        for token in first:
            begun = begun.longer.setdefault(token, _Begun())
        begun.last.append(last)
    return none


class Exclusion:
    """A `Binding` (grammar/backend.py) of one sequence; its state depends on the log alone."""

    terminated = False

    def __init__(self, log: SequenceLog, vocab_size: int) -> None:
        """Start where `log` is. Ids are of the vocabulary; no bad word is empty."""
        params = log.params
        self._mask = np.full(words_of(vocab_size), -1, np.int32)
        if params.allowed_tokens:
            self._mask[:] = np.frombuffer(params.allowed_tokens, np.int32)
        self._none = _none_begun(params.bad_words_token_ids)
        leave_out(self._mask, self._none.last)
        self._begun: list[_Begun] = []
        for token in log.tokens[log.prompt_length :]:
            self.accept(token)

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write the tokens that may come next to `bitmask[row]`."""
        bitmask[row] = self._mask
        for begun in self._begun:
            leave_out(bitmask[row], begun.last)

    def accept(self, token: int) -> bool:
        """Advance by one token."""
        followed = (self._none, *self._begun)
        self._begun = [begun.longer[token] for begun in followed if token in begun.longer]
        return True
