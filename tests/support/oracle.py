"""A proposer that knows the answer, and proposes right, wrong and mixed drafts."""

import random
from collections.abc import Callable, Mapping, Sequence

from engine_harness import Played

from personae.engine.sequence import SequenceLog
from personae.engine.speculation.proposer import Draft, Proposer


class Oracle:
    """Guesses the next tokens of an answer. Each token is right with probability `right`."""

    def __init__(self, log: SequenceLog, answer: Sequence[int], right: float, vocab_size: int) -> None:
        self._answer = answer
        self._length = len(log.tokens) - log.prompt_length
        self._right = right
        self._vocab_size = vocab_size
        self._dice = random.Random(f"{log.id} {right}")

    def extend(self, tokens: Sequence[int]) -> None:
        self._length += len(tokens)

    def propose(self, most: int) -> Draft | None:
        random_ = self._dice
        ahead = self._answer[self._length : self._length + random_.randint(1, most)]
        ahead = [*ahead, *(random_.randrange(self._vocab_size) for _ in range(most - len(ahead)))]
        tokens = [
            token if random_.random() < self._right else random_.randrange(self._vocab_size)
            for token in ahead
        ]
        return Draft(tuple(tokens), "oracle")


def oracles(
    truth: Mapping[str, Played], right: float, vocab_size: int
) -> Callable[[SequenceLog], tuple[Proposer, ...]]:
    """Proposers for sequences whose answers are known by id."""
    return lambda log: (Oracle(log, truth[log.id].tokens, right, vocab_size),)
