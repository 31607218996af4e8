"""A request's stream in the frontend: the token log so far, and the inbox that gets its deltas."""

import hashlib
import logging

from msgspec.structs import replace

from personae.actors.frontend.inbox import Inbox
from personae.actors.frontend.probation import CrashRecord
from personae.engine.numerics import NumericsClass
from personae.engine.sequence import Delta, SequenceLog

log = logging.getLogger(__name__)

QUARANTINED = "This request made the engine fail each time it ran."


class LiveStream:
    """A sequence that has not ended: its log, the tokens it emitted, and its inbox (None: nobody listens any
    more)."""

    __slots__ = (
        "delivered",
        "delivered_any",
        "emitted",
        "first",
        "inbox",
        "log",
        "moved",
        "numerics",
        "on_device",
        "opened",
        "queued",
        "record",
        "seen",
        "started",
    )

    def __init__(self, log: SequenceLog, inbox: Inbox, now: float) -> None:
        self.log = log
        self.inbox: Inbox | None = inbox
        self.opened = now
        self.queued: float | None = None  # seconds until it first ran, in any epoch
        self.emitted: list[int] = []
        self.first = 0.0  # seconds until its first token, if it has latency targets
        self.seen = self.delivered = 0  # prompt logprobs: of this pass over the prompt, and in all
        self.started = self.on_device = False  # in this epoch of the engine core
        self.delivered_any = False  # something was delivered, in any epoch
        self.record = CrashRecord()
        self.numerics: NumericsClass | None = None  # of its engine, if there are several
        self.moved = 0  # moves to an engine of another class since the last delta

    @property
    def tokens(self) -> int:
        """The number of tokens of its prompt and its answer so far; 0 before it first runs."""
        emitted = len(self.emitted)
        return emitted + self.log.prompt_length if emitted or self.on_device else 0

    def begin_running(self, now: float) -> None:
        """Note that the engine computes it from now on. If that could have been refused until now, an empty
        delta tells its reader."""
        self.on_device = True
        if self.queued is None:
            self.queued = now - self.opened
            if self.inbox is not None and (self.log.grammar is not None or self.log.adapter is not None):
                self.inbox.put(Delta(self.log.id))

    def serve_at(self, numerics: NumericsClass) -> bool:
        """Note that an engine of this class computes it from now on. Returns whether an engine of another
        class computed some of its tokens."""
        other = bool(self.emitted) and self.numerics != numerics
        self.numerics = numerics
        self.moved += other
        return other

    def begin_again(self) -> SequenceLog:
        """Return the log for a new run: the emitted tokens are appended, and `after` is dropped, since the
        leader may be gone."""
        self.started = self.on_device = False
        return replace(self.log, tokens=(*self.log.tokens, *self.emitted), after=None)

    def unseen(self, delta: Delta) -> Delta:
        """Return the delta without what an earlier epoch of the engine core already delivered. A new epoch
        computes prompt logprobs again, and cached tokens are counted once."""
        if self.delivered_any and delta.cached is not None:
            delta = replace(delta, cached=None)
        elif not self.delivered_any and self.queued is not None:
            delta = replace(delta, queued=self.queued)
        self.delivered_any = True
        if self.moved:
            delta, self.moved = replace(delta, moved=self.moved), 0
        entries = delta.prompt_logprobs
        if not entries:
            return delta
        # The first chunk begins with the first token's None: from there, what was delivered is repeated.
        self.seen = 0 if entries[0] is None else self.seen
        skip = max(0, min(self.delivered - self.seen, len(entries)))
        self.seen += len(entries)
        self.delivered = max(self.delivered, self.seen)
        return replace(delta, prompt_logprobs=entries[skip:]) if skip else delta

    def log_quarantine(self) -> None:
        """Log for the operator that this request ends because it makes the engine core crash."""
        prompt = hashlib.sha256(repr(self.log.tokens).encode()).hexdigest()
        log.error(
            "quarantined: sequence %s was running in %d crashes of the engine core: prompt %s, adapter %s",
            self.log.id,
            self.record.deaths,
            prompt,
            self.log.adapter,
        )
