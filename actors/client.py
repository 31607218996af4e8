"""The engine as its users see it: the API, the in-process library and the tools all hold an `EngineClient`.

They know nothing of actors behind it. A test may put any small program behind the same face.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from personae.actors.kit.gauges import Gauge
from personae.engine.sequence import Delta, SequenceLog
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


class AdapterUsage(msgspec.Struct, frozen=True):
    """Adapters on the device and on the host, those in line for the device; loads and their seconds by source
    ("device", "host", "disk"); live sequences by digest, those that run and those that wait."""

    device: int = 0
    host: int = 0
    host_bytes: int = 0
    line: int = 0
    evictions: int = 0
    yields: int = 0
    loads: dict[str, float] = {}
    load_seconds: dict[str, float] = {}
    running: dict[str, int] = {}
    waiting: dict[str, int] = {}


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot for `/metrics` and `/ready`. Counters only grow; times are seconds.

    `fairness_gap` is in weighted tokens, between the most and the least served that wait. `timings` is where
    the time of steps went; `tokens` were computed in all, prompts included, and `step_tokens` counts steps by
    theirs, in the buckets of `messages.STEP_TOKENS`; `jumped` were forced;
    `backlog_seconds` is how long it takes to compute what waits; `pages_lent` is how many KV pages' memory
    adapters have. With several replicas this is their sum: `replicas` has each one's own, and `moved` counts
    the streams that went on at another when theirs died.
    """

    ready: bool = True
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_used: int = 0
    pages_lent: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    host_gap_seconds: float = 0.0
    restarts: int = 0
    fairness_gap: float = 0.0
    adapters: AdapterUsage = AdapterUsage()
    page_size: int = 0
    tokens: int = 0
    step_tokens: tuple[int, ...] = ()
    jumped: int = 0
    backlog_seconds: float = 0.0
    timings: dict[str, float] = {}
    actors: tuple[Gauge, ...] = ()
    moved: int = 0
    replicas: "tuple[EngineStats, ...]" = ()


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
