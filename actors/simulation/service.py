"""Compares the service that tenants get with their adapters, over all engines of a run."""

from collections import Counter, defaultdict

from personae.engine.scheduling.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT, FairnessKey
from personae.engine.sequence import SequenceLog

Pair = tuple[str, str | None]
"""A tenant and an adapter: what fairness compares."""


class ServiceGaps:
    """The widest difference in service between two (tenant, adapter) while both have sequences that wait.

    A sequence waits from its arrival until an engine admits it. Service is counted in weighted tokens, from
    the moment when both wait: what an engine computes of prompts counts once, each token of an answer twice.
    """

    def __init__(self) -> None:
        self.widest = 0.0
        self._of: dict[str, Pair] = {}  # of the sequences that wait
        self._waiting: Counter[Pair] = Counter()
        self._service: defaultdict[Pair, float] = defaultdict(float)
        # How far one was ahead of the other when the later one of them began to wait.
        self._ahead: dict[Pair, dict[Pair, float]] = {}

    def arrive(self, log: SequenceLog) -> None:
        """A sequence has arrived."""
        new = self._of[log.id] = log.tenant, log.adapter
        self._waiting[new] += 1
        if self._waiting[new] > 1:
            return
        service = self._service
        self._ahead[new] = {}
        for other, ahead in self._ahead.items():
            if other != new:
                ahead[new] = service[other] - service[new]
                self._ahead[new][other] = -ahead[new]

    def begin(self, id: str) -> None:
        """A sequence is admitted, or has ended before."""
        pair = self._of.pop(id, None)
        if pair is None:
            return
        self._waiting[pair] -= 1
        if not self._waiting[pair]:
            del self._waiting[pair]
            for other in self._ahead.pop(pair):
                del self._ahead[other][pair]

    def charge(self, key: FairnessKey, input_tokens: int, output_tokens: int) -> None:
        """An engine has served this key."""
        pair, service = (key.tenant, key.adapter), self._service
        service[pair] += INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens
        for other, ahead in self._ahead.get(pair, {}).items():
            self.widest = max(self.widest, abs(service[pair] - service[other] - ahead))
