"""How many drafts a step has: as many as pay off, judged by step times and by how many drafts were right.

A step with more tokens takes longer; how much depends on the machine and the batch. A right draft saves a
step of its row. So the policy cuts the drafts such that the most tokens per second are expected. It takes
none if that does not pay off: in large batches, or if drafts are mostly wrong.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from personae.engine.speculation.proposer import Draft

FADE = 0.95  # weight that old counts keep with each new one
GUESS = 0.5  # the acceptance rate that is assumed without any data
TRUST = 2.0  # how many counted drafts a prior estimate is worth
DEAR = 1.25  # the assumed time of a step of two tokens over that of one, before steps were measured
STEPS = 8  # steps of one size that are measured before their time is trusted


class Candidate(NamedTuple):
    """A row's draft, and the row's own record."""

    draft: Draft
    record: "Record"


class Policy(Protocol):
    """Decides how many drafts to compute, and learns from the results."""

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> list[int]:
        """How many tokens of each draft to compute, in a step that has `tokens` without drafts."""

    def verified(self, candidate: Candidate, computed: int, accepted: int) -> None:
        """Of the candidate's tokens `computed` were computed and `accepted` were right."""

    def took(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens, without prompts, took `seconds`."""


class Record:
    """How many drafts were tried and how many were right, with fading weights."""

    __slots__ = ("right", "tried")

    def __init__(self) -> None:
        self.tried = self.right = 0.0

    def count(self, accepted: int, rejected: int) -> None:
        """Count the drafts that were right, and the first wrong one. Drafts after that one do not count as
        tried."""
        self.tried = self.tried * FADE + accepted + rejected
        self.right = self.right * FADE + accepted

    def estimate(self, otherwise: float) -> float:
        """The estimated share of right drafts; `otherwise` is the prior."""
        return (self.right + TRUST * otherwise) / (self.tried + TRUST)


class Always:
    """Tries every draft: for tests, and for those who want all drafts."""

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> list[int]:
        """See Policy."""
        return [len(candidate.draft.tokens) for candidate in candidates]

    def verified(self, candidate: Candidate, computed: int, accepted: int) -> None:
        """See Policy."""

    def took(self, tokens: int, seconds: float) -> None:
        """See Policy."""


class StepTable:
    """The time of steps by their tokens, learnt from measured steps with fading weights."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds: dict[int, float] = {}
        self._seen: dict[int, int] = defaultdict(int)

    def observe(self, tokens: int, seconds: float) -> None:
        """A step took `seconds`. A step that took far longer than similar ones counts as twice as long as
        these, because something else delayed the machine."""
        if tokens > self._most:
            return
        seen = self._seen[tokens] = min(self._seen[tokens] + 1, 4 * STEPS)
        old = self._seconds.get(tokens, seconds)
        self._seconds[tokens] = old + (min(seconds, 2 * old) - old) / seen

    def ratio(self, tokens: int, more: int) -> float:
        """How much longer a step takes with `more` additional tokens. Unknown times are interpolated between
        known ones, and extrapolated beyond them."""
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
    """Tries as many drafts as pay off. `most`: tokens of the largest step that is considered."""

    def __init__(self, most: int = 64) -> None:
        self._table = StepTable(most)
        self._most = most
        self._kinds: dict[tuple[str, int], Record] = defaultdict(Record)

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> list[int]:
        """See Policy. A draft's token is worth the probability that it and all tokens before it are right."""
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
                candidate.record.count(0, 0)  # its counts fade, so it will be tried again later
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
