"""The engine as its users see it: the API, the in-process library and the tools all hold an `EngineClient`.

They know nothing of actors behind it. A test may put any small program behind the same face.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Protocol

import msgspec

from personae.actors.kit.gauges import Gauge
from personae.actors.messages import AdapterStats
from personae.engine.sequence import Delta, SequenceLog
from personae.engine.stats import CounterMetric, GaugeMetric, SchedulerStats, StepSample
from personae.engine.tokens import Tokenizer


class ModelCard(msgspec.Struct, frozen=True):
    """A name that a request may put in `model`: the base (adapter None) or an adapter by content digest.

    `created` is Unix time in seconds; `parent` is the base's name for an adapter. `traits` say what it is
    beside low rank on linear modules; `invocation` are the tokens that activate it, none for always.
    `quantization`: how the base's weights are kept, None as its dtype says.
    """

    name: str
    adapter: str | None
    created: int
    parent: str | None = None
    rank: int | None = None
    traits: tuple[str, ...] = ()
    invocation: tuple[int, ...] = ()
    quantization: str | None = None


class QueueStats(msgspec.Struct, frozen=True):
    """One tenant's live sequences of one adapter (None: the base). `tokens` are those of prompts and answers
    so far, of sequences that have ended, too."""

    tenant: str
    adapter: str | None
    running: int = 0
    waiting: int = 0
    tokens: int = 0


class EngineStats(SchedulerStats, frozen=True):
    """A snapshot for `/metrics` and `/ready`; the counters go on over restarts.

    `backlog_seconds` is how long it takes to compute what waits. `adapter_running` and `adapter_waiting`
    count live sequences by their adapter's digest, `queues` by tenant and adapter. `recent_steps` are the
    last ones. With several replicas this is their sum, without `recent_steps`: `replicas` has each one's own
    by its number, and `moved` counts the streams that went on at another when theirs died or was removed,
    `changed` those of them that had tokens and went to one of another numerics class.
    """

    ready: Annotated[bool, GaugeMetric("personae:ready", "1 when the engine can serve.")] = True
    restarts: Annotated[
        int, CounterMetric("personae:back_restarts", "Times that the engine died and was started again.")
    ] = 0
    backlog_seconds: Annotated[
        float, GaugeMetric("personae:backlog_seconds", "How long it takes to compute what waits.")
    ] = 0.0
    adapters: AdapterStats = AdapterStats()
    adapter_running: dict[str, int] = msgspec.field(default_factory=dict)
    adapter_waiting: dict[str, int] = msgspec.field(default_factory=dict)
    queues: tuple[QueueStats, ...] = ()
    recent_steps: tuple[StepSample, ...] = ()
    actors: tuple[Gauge, ...] = ()
    moved: int = 0
    changed: int = 0
    replicas: "dict[int, EngineStats]" = msgspec.field(default_factory=dict)


class SequenceStream(Protocol):
    """The deltas of the sequences submitted together, in the order in which steps produce them."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Iterate until every sequence has ended. A delta with `finish` is its sequence's last."""

    def stop(self, id: str) -> None:
        """End one sequence now (a stop string was found); nothing more of it is delivered."""


class EngineClient(Protocol):
    """Submits token logs, hands back deltas."""

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
        """The names that this tenant may use, the base first."""

    def salt(self, tenant: str) -> bytes:
        """The prefix-cache salt of this tenant."""

    def stream(self, logs: Sequence[SequenceLog]) -> AbstractAsyncContextManager[SequenceStream]:
        """Submit. Entering raises Overloaded when the engine is full; leaving cancels whatever still runs.

        A GrammarError found while compiling is raised from the iteration, before any delta.
        """

    def stats(self) -> EngineStats:
        """What the engine is doing now; cheap."""
