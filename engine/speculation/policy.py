"""How many drafts a step has: as many as pay, going by what steps took and how many drafts were right.

A step of more tokens takes longer, how much longer depends on the machine and the batch; a draft that is
right saves a step of its row. So of all ways to cut the drafts that there are, the one is taken with the
most tokens a second to be expected. None is, where that does not pay: large batches, drafts that are mostly
wrong.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from personae.engine.speculation.proposer import Draft

FADE = 0.95  # of what was seen, each time that more is
GUESS = 0.5  # the acceptance of drafts that nothing is known of
TRUST = 2.0  # drafts that an estimate is worth, beside those that were counted
DEAR = 1.25  # the longest step of two tokens, over that of one, before anything is known
STEPS = 8  # of a size, before it is known what they take


class Candidate(NamedTuple):
    """A row's draft, and the row's own record."""

    draft: Draft
    record: "Record"


class Policy(Protocol):
    """Decides, and is told what came of it."""

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> list[int]:
        """How many of each draft's tokens to compute in a step of `tokens` otherwise."""

    def verified(self, candidate: Candidate, computed: int, accepted: int) -> None:
        """So many of its tokens were computed, and of them so many right."""

    def took(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens, prompts aside, took so long."""


class Record:
    """Drafts that were tried and those that were right, older ones fading."""

    __slots__ = ("right", "tried")

    def __init__(self) -> None:
        self.tried = self.right = 0.0

    def count(self, accepted: int, rejected: int) -> None:
        """Drafts that turned out right, and the one that did not; what is behind that was not tried."""
        self.tried = self.tried * FADE + accepted + rejected
        self.right = self.right * FADE + accepted

    def estimate(self, otherwise: float) -> float:
        """The share that is right; `otherwise` is what is assumed."""
        return (self.right + TRUST * otherwise) / (self.tried + TRUST)


class Always:
    """Every draft is tried: for tests, and for whoever wants them all."""

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> list[int]:
        """See Policy."""
        return [len(candidate.draft.tokens) for candidate in candidates]

    def verified(self, candidate: Candidate, computed: int, accepted: int) -> None:
        """See Policy."""

    def took(self, tokens: int, seconds: float) -> None:
        """See Policy."""


class StepTable:
    """What steps take by their tokens, learnt from those that were made, older ones fading."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds: dict[int, float] = {}
        self._seen: dict[int, int] = defaultdict(int)

    def observe(self, tokens: int, seconds: float) -> None:
        """A step took so long. One that took far longer than those like it counts as twice as long:
        something else held up the machine."""
        if tokens > self._most:
            return
        seen = self._seen[tokens] = min(self._seen[tokens] + 1, 4 * STEPS)
        old = self._seconds.get(tokens, seconds)
        self._seconds[tokens] = old + (min(seconds, 2 * old) - old) / seen

    def ratio(self, tokens: int, more: int) -> float:
        """How much longer a step with `more` tokens more takes; what is not known is assumed to lie between
        what is, and beyond it to grow as it did."""
        base = self._of(tokens)
        return 1 + more * (DEAR - 1) / max(tokens, 1) if base is None else self._from(base, tokens, more)

    def _of(self, tokens: int) -> float | None:
        return self._seconds[tokens] if self._seen.get(tokens, 0) >= STEPS else None

    def _from(self, base: float, tokens: int, more: int) -> float:
        longer = self._of(tokens + more)
        if longer is not None:
            return max(longer / base, 1.0)
        known = [size for size in self._seconds if size > tokens and self._of(size) is not None]
        below = max((size for size in known if size < tokens + more), default=tokens)
        above = min((size for size in known if size > tokens + more), default=None)
        at_below = self._seconds[below]
        if above is not None:
            share = (tokens + more - below) / (above - below)
            return max((at_below + share * (self._seconds[above] - at_below)) / base, 1.0)
        slope = (at_below - base) / (below - tokens) if below > tokens else (DEAR - 1) * base / tokens
        return max((at_below + max(slope, 0.0) * (tokens + more - below)) / base, 1.0)


class Measured:
    """Tries as many drafts as pay. `most`: tokens of the largest step that is looked at."""

    def __init__(self, most: int = 64) -> None:
        self._table = StepTable(most)
        self._most = most
        self._kinds: dict[tuple[str, int], Record] = defaultdict(Record)

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> list[int]:
        """See Policy. Of each draft the next token is worth the chance that all up to it are right."""
        gains = sorted(
            (
                (chance, row)
                for row, candidate in enumerate(candidates)
                for chance in self._chances(candidate)
            ),
            reverse=True,
        )
        counts = [0] * len(candidates)
        best, total, chosen = 1.0, 0.0, 0
        for count, (chance, _) in enumerate(gains[: max(self._most - tokens, 0)], 1):
            total += chance
            speed = (tokens + total) / tokens / self._table.ratio(tokens, count)
            if speed > best:
                best, chosen = speed, count
        for _, row in gains[:chosen]:
            counts[row] += 1
        for candidate, count in zip(candidates, counts, strict=True):
            if not count:
                candidate.record.count(0, 0)  # what is not tried is forgotten, and tried again some day
        return counts

    def _chances(self, candidate: Candidate) -> list[float]:
        draft = candidate.draft
        each = candidate.record.estimate(self._kind(draft).estimate(GUESS))
        return [each ** (place + 1) for place in range(len(draft.tokens))]

    def _kind(self, draft: Draft) -> Record:
        return self._kinds[draft.source, draft.match.bit_length()]

    def verified(self, candidate: Candidate, computed: int, accepted: int) -> None:
        """See Policy."""
        for record in (candidate.record, self._kind(candidate.draft)):
            record.count(accepted, int(accepted < computed))

    def took(self, tokens: int, seconds: float) -> None:
        """See Policy."""
        self._table.observe(tokens, seconds)
