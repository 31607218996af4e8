"""A step's sampled tokens on their way from the device to the host."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import NamedTuple

from torch import Tensor

from personae.engine.device_event import DeviceToHostEvent, to_host
from personae.engine.logprobs import LogprobRows
from personae.engine.plan import NOT_FINITE, NOTHING_ALLOWED
from personae.engine.sequence import TokenLogprobs


class VerifiedTokens(NamedTuple):
    """The result of host verification: the rows without a token yet, and the rows whose first token was
    replaced."""

    undecided: frozenset[int]
    replaced: frozenset[int]


@dataclass(frozen=True, slots=True)
class TokenChoices:
    """A step's tokens on the host, by row. The token of a failed row is None, and `failures` has the reason.
    The token of an `undecided` row is None too, as if it had not been sampled."""

    tokens: list[int | None]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    undecided: frozenset[int] = frozenset()


class SampledTokens:
    """A step's tokens, being copied to the host: the copies were queued after sampling, and `read` waits for
    them.

    If some tokens need host verification, they are final only after `settle`. `replaced` has the rows whose
    token changed: a step that was launched before that has computed them with the first token. `on_settled`
    is called once, when they are final; never if they are from the start.
    """

    on_settled: Callable[[], None] | None = None

    def __init__(
        self,
        tokens: Tensor,
        best: Tensor,
        rows: list[int],
        tops: list[int],
        conclude: Callable[[frozenset[int]], LogprobRows | None],
        ask: Callable[[list[int], list[float]], VerifiedTokens] | None = None,
    ):
        """tokens [S] int64, best [S] float32 (the largest allowed logit). `rows` request logprobs, with
        `tops` alternatives each. `ask` verifies the tokens and may change them. `conclude` gets the undecided
        rows and does the work that needs final tokens."""
        self.tokens = tokens
        self._best_of_device = best
        self._rows = rows
        self._tops = tops
        self._conclude = conclude
        self._verify = ask
        self.undecided: frozenset[int] = frozenset()
        self.replaced: frozenset[int] = frozenset()
        self._choices: TokenChoices | None = None  # once they are read
        self._send(None if ask is not None else conclude(self.undecided))

    def _send(self, found: LogprobRows | None) -> None:
        """Queue the copies."""
        self._tokens = to_host(self.tokens)
        self._best = to_host(self._best_of_device)
        self._found = found and found.to_host()
        self._arrival = DeviceToHostEvent(self.tokens.device)

    @property
    def ready(self) -> bool:
        """Whether `read` would return at once."""
        return self._arrival.reached

    def settle(self) -> None:
        """Make the tokens final, before others use them. Waits for the device if tokens need verification."""
        if self._verify is not None:
            ask, self._verify = self._verify, None
            self._arrival.wait()
            self.undecided, self.replaced = ask(self._tokens.tolist(), self._best.tolist())
            self._send(self._conclude(self.undecided))
            if self.on_settled is not None:
                self.on_settled()
                self.on_settled = None

    def read(self) -> TokenChoices:
        """Wait until the tokens are final and on the host, and return them."""
        if self._choices is not None:
            return self._choices
        if self._verify is not None:
            self.settle()
        self._arrival.wait()
        tokens: list[int | None] = self._tokens.tolist()
        failures: dict[int, str] = {}
        for row, most in enumerate(self._best.tolist()):
            if row in self.undecided:
                tokens[row] = None
            elif not isfinite(most):
                failures[row] = NOTHING_ALLOWED if most == -inf else NOT_FINITE
                tokens[row] = None
        logprobs: dict[int, TokenLogprobs] = {}
        if self._found is not None:
            entries = zip(self._rows, self._found.read(self._tops), strict=True)
            logprobs = {row: entry for row, entry in entries if tokens[row] is not None}
        self._choices = TokenChoices(tokens, logprobs, failures, self.undecided)
        return self._choices
