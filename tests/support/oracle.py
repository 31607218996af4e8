"""A proposer that knows the answer, and says so as often as it is told to: right, wrong and mixed drafts."""

import random
from collections.abc import Callable, Mapping, Sequence

from engine_harness import Played

from personae.engine.sequence import SequenceLog
from personae.engine.speculation.proposer import Draft, Proposer


class Oracle:
    """Guesses how an answer goes on. Each token is right with probability `right`."""

    def __init__(self, log: SequenceLog, answer: Sequence[int], right: float, vocab_size: int) -> None:
        self._answer = answer
        self._said = len(log.tokens) - log.prompt_length
        self._right = right
        self._vocab_size = vocab_size
        self._dice = random.Random(f"{log.id} {right}")

    def extend(self, tokens: Sequence[int]) -> None:
        self._said += len(tokens)

    def propose(self, most: int) -> Draft | None:
        dice = self._dice
        ahead = self._answer[self._said : self._said + dice.randint(1, most)]
        ahead = [*ahead, *(dice.randrange(self._vocab_size) for _ in range(most - len(ahead)))]
        tokens = [
            token if dice.random() < self._right else dice.randrange(self._vocab_size) for token in ahead
        ]
        return Draft(tuple(tokens), "oracle")


def oracles(
    truth: Mapping[str, Played], right: float, vocab_size: int
) -> Callable[[SequenceLog], tuple[Proposer, ...]]:
    """Proposers for sequences whose answers are known by id."""
    return lambda log: (Oracle(log, truth[log.id].tokens, right, vocab_size),)
