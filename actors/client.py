"""The engine as its users see it. The API, the in-process library and the tools all hold an `EngineClient`.

They know nothing of the actors behind it. A test may implement the same interface with a small program.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Protocol

import msgspec

from personae.actors.kit.gauges import Gauge
from personae.actors.messages import AdapterStats
from personae.engine.sequence import Delta, SequenceLog
from personae.engine.stats import CounterMetric, GaugeMetric, SchedulerStats, StepSample
from personae.engine.tokens import Tokenizer


class ModelCard(msgspec.Struct, frozen=True):
    """A name that a request may put in `model`: the base (adapter None), or an adapter by content digest.

    `created` is Unix time in seconds; `parent` is the base's name for an adapter. `traits` names what an
    adapter has besides low-rank updates of linear modules. `invocation` are the tokens that activate it; if
    empty, it is always active. `quantization` is the format of the base's weights; None: its dtype. `version`
    is the exact version of an uploaded adapter, as `poet@2`; `alias` is the name that a request asked for, if
    an alias chose this model. `defaults` are the version's own, as JSON, for fields that a request leaves
    out.
    """

    name: str
    adapter: str | None
    created: int
    parent: str | None = None
    rank: int | None = None
    traits: tuple[str, ...] = ()
    invocation: tuple[int, ...] = ()
    quantization: str | None = None
    version: str | None = None
    alias: str | None = None
    defaults: str = "{}"

    @property
    def ran(self) -> str:
        """What answers a request, by its most exact name."""
        return self.version or self.name


class QueueStats(msgspec.Struct, frozen=True):
    """One tenant's live sequences of one adapter (None: the base). `tokens` counts the tokens of prompts and
    answers so far, including those of sequences that have ended."""

    tenant: str
    adapter: str | None
    running: int = 0
    waiting: int = 0
    tokens: int = 0


class EngineStats(SchedulerStats, frozen=True):
    """A snapshot for `/metrics` and `/ready`. The counters continue over restarts.

    `backlog_seconds` is how long the waiting work takes to compute. `adapter_running` and `adapter_waiting`
    count live sequences by their adapter's digest, `queues` by tenant and adapter. `recent_steps` are the
    last steps of one engine. With several replicas the figures are sums without `recent_steps`, and
    `replicas` has each replica's own by its number. `moved` counts the streams that continued at another
    replica after theirs died or was removed; `changed` counts those among them that had tokens and went to
    another numerics class. `prefilled` counts those whose prompt was computed by a replica that does only
    that; there are `prefill_engines` of these now.
    """

    ready: Annotated[bool, GaugeMetric("personae:ready", "1 when the engine can serve.")] = True
    restarts: Annotated[
        int, CounterMetric("personae:engine_restarts", "Times that the engine died and was restarted.")
    ] = 0
    backlog_seconds: Annotated[
        float, GaugeMetric("personae:backlog_seconds", "Seconds that it takes to compute the waiting work.")
    ] = 0.0
    cold_start_seconds: Annotated[
        float,
        GaugeMetric("personae:cold_start_seconds", "Seconds that the last start of an added engine took."),
    ] = 0.0
    adapters: AdapterStats = AdapterStats()
    adapter_running: dict[str, int] = msgspec.field(default_factory=dict)
    adapter_waiting: dict[str, int] = msgspec.field(default_factory=dict)
    queues: tuple[QueueStats, ...] = ()
    recent_steps: tuple[StepSample, ...] = ()
    actors: tuple[Gauge, ...] = ()
    moved: int = 0
    prefilled: int = 0
    prefill_engines: int = 0
    changed: int = 0
    replicas: "dict[int, EngineStats]" = msgspec.field(default_factory=dict)


class SequenceStream(Protocol):
    """The deltas of sequences that were submitted together, in the order in which steps produce them."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Iterate until every sequence has ended. A delta with `finish` is its sequence's last."""

    def take_at_once(self, take: Callable[[Delta], bool]) -> None:
        """Call `take` with each delta that arrives while the iteration waits. If it returns False, the
        iteration brings the delta. What it raises, the iteration raises."""

    def stop(self, id: str) -> None:
        """End one sequence now (a stop string was found). No more deltas of it are delivered."""


class EngineClient(Protocol):
    """Submits token logs and returns their deltas."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The base model's tokenizer."""

    @property
    def max_model_len(self) -> int:
        """The most tokens a sequence may have, prompt and answer together."""

    @property
    def vocab_size(self) -> int:
        """Rows of the model's logits (the tokenizer may know fewer ids)."""

    def models(self, tenant: str) -> Mapping[str, ModelCard]:
        """The names that this tenant may use, with the base first."""

    def salt(self, tenant: str) -> bytes:
        """The prefix-cache salt of this tenant."""

    def stream(self, logs: Sequence[SequenceLog]) -> AbstractAsyncContextManager[SequenceStream]:
        """Submit sequences. Entering raises Overloaded when the engine is full; leaving cancels the
        unfinished ones.

        The iteration raises a GrammarError from compilation before any delta. A sequence with a grammar or an
        adapter has an empty delta first, when it begins to run.
        """

    def stats(self) -> EngineStats:
        """Return what the engine is doing now; cheap."""

    def keep_session(self, tenant: str, session: str, seconds: float) -> None:
        """Keep the pages of a tenant's session for so long from now on; 0: no longer."""

    def keep_loaded(self, adapters: Sequence[str]) -> None:
        """Load the adapters of these digests, and keep them on the device until the next call. Together they
        must leave room for others."""

    def forget_session(self, tenant: str, session: str) -> None:
        """Delete the pages of a tenant's session that nobody else uses, in memory and in the tier."""
