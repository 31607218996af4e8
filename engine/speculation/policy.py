"""How many drafts a step has: as many as pay off, judged by step times and by how many drafts were right.

A step with more tokens takes longer; how much depends on the machine and the batch. A right draft saves a
step of its row. So the policy cuts the drafts such that the most tokens per second are expected. It takes
none if that does not pay off: in large batches, or if drafts are mostly wrong.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from personae.engine.scheduling.step_time import StepCost
from personae.engine.speculation.proposer import Draft

FADE = 0.95  # weight that old counts keep with each new one
KIND_FADE = 0.998  # the same for all drafts of one kind, when a draft is not tried
GUESS = 0.5  # the acceptance rate that is assumed without any data
TRUST = 2.0  # how many counted drafts a prior estimate is worth
LATEST = 64  # measured times whose mean counts
VAIN = 4  # steps without a draft that is worth trying, after which the policy rests
PASS = 0.15  # the assumed time of a pass of the draft model over that of a step, before both were measured
THRIFT = 0.8  # a draft that is there is taken if it is at least this likely, relative to the draft model's
WORTH = 1.1  # the least speed to expect, relative to none: the best of many noisy estimates is too good
PAUSE = 3  # times the time of a step: a longer time until the next one says nothing about steps


class Candidate(NamedTuple):
    """A row's draft, and the row's own record of drafts from its source. A draft of the draft model has no
    tokens yet: it can have up to `promised`."""

    draft: Draft
    record: "Record"
    promised: int = 0

    @property
    def most(self) -> int:
        """How many tokens the draft can have."""
        return self.promised or len(self.draft.tokens)


class Policy(Protocol):
    """Decides how many drafts to compute, and learns from the results."""

    def prefer(self, text: Candidate, model: Candidate) -> Candidate:
        """The better draft of a row: one that is there, or one that the draft model would make."""

    def catches_up(self, lag: int, emitted: int, each: int) -> bool:
        """Whether the draft model should compute `lag` tokens of a sequence to guess after them. The answer
        has `emitted` tokens so far, and `each` of them may bring so many tokens."""

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> list[int]:
        """How many tokens of each draft to compute, in a step that has `tokens` without drafts."""

    def rest(self, rows: int, *, tried: bool) -> int:
        """For how many steps no draft should be looked for, after a step of `rows` rows in which drafts were
        looked for, and `tried` or not."""

    def drafted(self, tokens: int, seconds: float) -> None:
        """A pass of the draft model over `tokens` tokens took `seconds`."""

    def paced(self, tokens: int, seconds: float, *, ahead: bool) -> None:
        """From one step of `tokens` tokens, without drafts and prompts, to the next one it took `seconds`.
        `ahead`: the next one did not wait for its results."""

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

    def fade(self, share: float) -> None:
        """Let the counts keep this share of their weight."""
        self.tried *= share
        self.right *= share

    def estimate(self, otherwise: float) -> float:
        """The estimated share of right drafts; `otherwise` is the prior."""
        return (self.right + TRUST * otherwise) / (self.tried + TRUST)


class Mean:
    """The mean of the latest values, with fading weights."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count, self.value = 0, 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self.count = min(self.count + 1, LATEST)
        self.value += (value - self.value) / self.count


class Always:
    """Tries every draft: for tests, and for those who want all drafts."""

    def prefer(self, text: Candidate, model: Candidate) -> Candidate:
        """See Policy."""
        return text

    def catches_up(self, lag: int, emitted: int, each: int) -> bool:
        """See Policy."""
        return True

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> list[int]:
        """See Policy."""
        return [candidate.most for candidate in candidates]

    def rest(self, rows: int, *, tried: bool) -> int:
        """See Policy."""
        return 0

    def drafted(self, tokens: int, seconds: float) -> None:
        """See Policy."""

    def paced(self, tokens: int, seconds: float, *, ahead: bool) -> None:
        """See Policy."""

    def verified(self, candidate: Candidate, computed: int, accepted: int) -> None:
        """See Policy."""

    def took(self, tokens: int, seconds: float) -> None:
        """See Policy."""


class Measured:
    """Tries as many drafts as pay off. `most`: tokens of the largest step that is considered."""

    def __init__(self, most: int = 64) -> None:
        self._steps = StepCost()
        self._passes = StepCost()
        self._most = most
        self._kinds: dict[tuple[str, int], Record] = defaultdict(Record)
        self._waiting = Mean()  # seconds for each row from step to step, less a step's time
        self._ahead = Mean()  # the same if steps do not wait for results
        self._speed = 1.0  # the expected speed of the last step that was looked at
        self._vain = 0  # steps in a row in which no draft was worth trying
        self._rest = 0  # the length of the last rest

    def prefer(self, text: Candidate, model: Candidate) -> Candidate:
        """See Policy. A draft that is there costs nothing to make."""
        return text if self._rate(text) >= THRIFT * self._rate(model) else model

    def catches_up(self, lag: int, emitted: int, each: int) -> bool:
        """See Policy. Short answers to long prompts end before that pays."""
        return lag <= each * (emitted + 1)

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> list[int]:
        """See Policy. A draft's token is worth the probability that it and all tokens before it are right."""
        speed, counts = self._best(tokens, candidates)
        if any(candidate.promised for candidate in candidates):
            texts = [candidate._replace(promised=0) for candidate in candidates]
            other, others = self._best(tokens, texts)
            if other >= speed:
                speed, counts = other, others
        self._speed = speed
        for candidate, count in zip(candidates, counts, strict=True):
            if not count:
                # What is not tried fades, so it will be tried again later.
                candidate.record.fade(FADE)
                self._kind(candidate.draft).fade(KIND_FADE)
        return counts

    def rest(self, rows: int, *, tried: bool) -> int:
        """See Policy. Looking for drafts delays a step by a little for each row, because it waits for the
        results of the step before. So rests become longer as long as no draft is worth trying, or those that
        are do not make up for the delay: up to two steps for each row but the first."""
        if tried and self._speed >= self._delay(rows):
            self._vain = self._rest = 0
            return 0
        self._vain += 1
        if self._vain < VAIN:
            return 0
        self._vain -= 1  # one more look decides
        self._rest = min(max(2 * self._rest, 1), 2 * (rows - 1))
        return self._rest

    def _delay(self, rows: int) -> float:
        """How much longer a step takes that waits for the results of the step before."""
        step = self._steps.of(rows)
        if not (step and self._waiting.count and self._ahead.count):
            return 1.0
        return max((step + rows * self._waiting.value) / (step + rows * self._ahead.value), 1.0)

    def _best(self, tokens: int, candidates: Sequence[Candidate]) -> tuple[float, list[int]]:
        """The expected speed relative to a step without drafts, and how many tokens of each draft bring
        it."""
        gains = sorted(
            (
                (chance, row, place + 1 if candidate.promised else 0)
                for row, candidate in enumerate(candidates)
                for place, chance in enumerate(self._chances(candidate))
            ),
            key=lambda gain: (-gain[0], -gain[1]),
        )
        pass_time = self._pass_time(tokens, sum(candidate.promised > 0 for candidate in candidates))
        counts = [0] * len(candidates)
        best, total, chosen, passes = 1.0, 0.0, 0, 0
        gains = gains[: max(self._most - tokens, 0)]
        longer = self._longer(tokens)
        for count, (chance, _, depth) in enumerate(gains, 1):
            total += chance
            passes = max(passes, depth)
            speed = (tokens + total) / tokens / (1 + count * longer + passes * pass_time)
            if speed > best:
                best, chosen = speed, count
        for _, row, _ in gains[:chosen]:
            counts[row] += 1
        if best < WORTH:
            return 1.0, [0] * len(candidates)
        return best, counts

    def _longer(self, tokens: int) -> float:
        """How much longer a step of `tokens` tokens takes with one more, as a share of its time."""
        step = self._steps.of(tokens)
        return self._steps.each / step if step > 0 else 1 / (tokens + 8)

    def _pass_time(self, tokens: int, rows: int) -> float:
        """How long a pass of the draft model over `rows` tokens takes, in steps of `tokens` tokens."""
        step, drafting = self._steps.of(tokens), self._passes.of(rows)
        return drafting / step if step > 0 and drafting > 0 else PASS

    def _chances(self, candidate: Candidate) -> list[float]:
        each = self._rate(candidate)
        return [each ** (place + 1) for place in range(candidate.most)]

    def _rate(self, candidate: Candidate) -> float:
        """The estimated probability that a token of the draft is right, if those before it are."""
        return candidate.record.estimate(self._kind(candidate.draft).estimate(GUESS))

    def _kind(self, draft: Draft) -> Record:
        return self._kinds[draft.source, draft.match.bit_length()]

    def drafted(self, tokens: int, seconds: float) -> None:
        """See Policy."""
        self._passes.observe(tokens, seconds)

    def paced(self, tokens: int, seconds: float, *, ahead: bool) -> None:
        """See Policy."""
        step = self._steps.of(tokens)
        if seconds < PAUSE * step:
            (self._ahead if ahead else self._waiting).add((seconds - step) / tokens)

    def verified(self, candidate: Candidate, computed: int, accepted: int) -> None:
        """See Policy."""
        for record in (candidate.record, self._kind(candidate.draft)):
            record.count(accepted, int(accepted < computed))

    def took(self, tokens: int, seconds: float) -> None:
        """See Policy."""
        if tokens <= self._most:
            self._steps.observe(tokens, seconds)
