"""Drafts from a text that the caller expects in the answer: OpenAI's `prediction`, as for edited code."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from personae.engine.speculation.proposer import Draft

SIZE = 2  # tokens by which the position is found again
SOURCE = "prediction"


class PredictionProposer:
    """Follows an answer along its prediction. When the answer departs from it, the position is found again by
    the answer's last tokens: the first such position after the last one, or else the first of all."""

    def __init__(self, prediction: Sequence[int], emitted: Sequence[int] = ()) -> None:
        self._prediction = prediction
        self._at: int | None = 0  # the position of the next token, if the answer follows the prediction
        self._last = 0  # the last such position
        self._followed = 0  # tokens that matched since the position was found
        self._tail: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for end in range(SIZE, len(prediction)):
            self._places[tuple(prediction[end - SIZE : end])].append(end)
        self.extend(emitted)

    def extend(self, tokens: Sequence[int]) -> None:
        """See Proposer."""
        for token in tokens:
            self._tail = [*self._tail[1 - SIZE :], token]
            at = self._at
            if at is not None and at < len(self._prediction) and self._prediction[at] == token:
                self._at, self._followed = at + 1, self._followed + 1
            else:
                self._at = self._found()
                self._followed = SIZE
            if self._at is not None:
                self._last = self._at

    def _found(self) -> int | None:
        places = self._places.get(tuple(self._tail), [])
        behind = bisect_left(places, self._last)
        if behind < len(places):
            return places[behind]
        return places[0] if places else None

    def propose(self, most: int) -> Draft | None:
        """See Proposer."""
        at = self._at
        if at is None or at >= len(self._prediction):
            return None
        return Draft(tuple(self._prediction[at : at + most]), SOURCE, self._followed)
