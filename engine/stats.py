"""The engine's counters: one type from the step to `/metrics`.

To add a counter, add a field to `EngineCounters`, and count where it happens: the code there adds to the
field. A copy goes with every step, the frontend adds up the epochs of the engine core, and `/metrics` shows
each field by its `Metric`. A figure that may also fall is a field of `SchedulerStats`.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec

from personae.engine.plan import ExpertBalance

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets that count steps by their tokens. One more bucket has all larger steps."""

MAX_DRAFTS = 7
"""Per row: with its newest token, a row has eight."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Metric:
    """How `/metrics` shows a field. A value with parts has a series for each part, with `label` naming the
    part."""

    name: str
    help: str
    label: str | None = None


class CounterMetric(Metric):
    """A metric that only grows."""


class GaugeMetric(Metric):
    """A metric that may also fall."""


class StepTimings(msgspec.Struct, frozen=True):
    """The seconds that parts of steps took.

    `plan`: deciding which sequences run, and committing results. `forward`: packing the rows and launching
    the model (on a CPU, running it). `sample`: grammar masks and sampling. `read`: waiting for the tokens and
    advancing the grammars. `place`: copying adapters between steps.
    """

    plan: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    read: float = 0.0
    place: float = 0.0


class EngineCounters(msgspec.Struct):
    """Everything that only grows, since the engine core started. Times are in seconds. `step_tokens` counts
    steps by their tokens, in the buckets of STEP_TOKENS."""

    prefix_queries: Annotated[
        int, CounterMetric("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.")
    ] = 0
    prefix_hits: Annotated[
        int, CounterMetric("vllm:prefix_cache_hits", "Prompt tokens found in the cache.")
    ] = 0
    tier_hits: Annotated[
        int,
        CounterMetric(
            "personae:kv_tier_hits",
            "Prompt tokens found in a tier or in another engine; the cache hits include them.",
        ),
    ] = 0
    tier_stored: Annotated[int, CounterMetric("personae:kv_tier_stored", "KV pages written to the tier.")] = 0
    tier_errors: Annotated[
        int,
        CounterMetric("personae:kv_tier_errors", "Failures of the tier; requests are computed instead."),
    ] = 0
    preemptions: Annotated[
        int, CounterMetric("vllm:num_preemptions", "Preemptions of running sequences.")
    ] = 0
    steps: Annotated[int, CounterMetric("personae:steps", "Steps run.")] = 0
    tokens: Annotated[
        int, CounterMetric("personae:step_tokens", "Tokens computed in steps, prompts included.")
    ] = 0
    jumped: Annotated[
        int, CounterMetric("personae:jumped_tokens", "Tokens that a grammar forced, without sampling.")
    ] = 0
    drafts: Annotated[
        int, CounterMetric("vllm:spec_decode_num_drafts", "Drafts made by speculation, of a token or more.")
    ] = 0
    draft_tokens: Annotated[int, CounterMetric("vllm:spec_decode_num_draft_tokens", "Tokens of drafts.")] = 0
    accepted_tokens: Annotated[
        int, CounterMetric("vllm:spec_decode_num_accepted_tokens", "Tokens of drafts that were right.")
    ] = 0
    accepted_at: Annotated[
        tuple[int, ...],
        CounterMetric(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Tokens of drafts that were right, by their position in the draft.",
            label="position",
        ),
    ] = (0,) * MAX_DRAFTS
    drafts_by: Annotated[
        dict[str, int],
        CounterMetric("personae:draft_tokens", "Tokens of drafts, by who made them.", label="source"),
    ] = {}
    accepted_by: Annotated[
        dict[str, int],
        CounterMetric(
            "personae:accepted_draft_tokens",
            "Tokens of drafts that were right, by who made them.",
            label="source",
        ),
    ] = {}
    step_seconds: Annotated[float, CounterMetric("personae:step_seconds", "Time in steps.")] = 0.0
    gap_seconds: Annotated[
        float,
        CounterMetric("personae:host_gap_seconds", "Time between steps in which the device was idle."),
    ] = 0.0
    timings: Annotated[
        StepTimings, CounterMetric("personae:step_part_seconds", "Time in parts of steps.", label="part")
    ] = StepTimings()
    expert_moves: Annotated[
        int, CounterMetric("personae:expert_moves", "Experts that went to another group of ranks.")
    ] = 0
    expert_rows: Annotated[
        dict[str, float],
        CounterMetric(
            "personae:expert_rows",
            "Rows that experts computed, of each layer's busiest group of ranks and of a group in the mean.",
            label="group",
        ),
    ] = {}
    step_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)

    def count_tokens(self, tokens: int) -> None:
        """Count a step and its tokens."""
        self.tokens += tokens
        bucket = bisect_left(STEP_TOKENS, tokens)
        counts = self.step_tokens
        self.step_tokens = (*counts[:bucket], counts[bucket] + 1, *counts[bucket + 1 :])

    def count_experts(self, balance: ExpertBalance) -> None:
        """Take over what the ranks have counted since the engine started."""
        self.expert_moves = balance.moved
        self.expert_rows = {"busiest": balance.busiest, "mean": balance.mean}

    def count_drafts(self, computed: int, accepted: int, source: str = "") -> None:
        """Count the drafts of a row, and how many were right. `source` made them."""
        self.drafts += 1
        self.draft_tokens += computed
        self.accepted_tokens += accepted
        self.drafts_by = {**self.drafts_by, source: self.drafts_by.get(source, 0) + computed}
        self.accepted_by = {**self.accepted_by, source: self.accepted_by.get(source, 0) + accepted}
        self.accepted_at = tuple(count + (place < accepted) for place, count in enumerate(self.accepted_at))

    def __add__(self, other: "EngineCounters") -> "EngineCounters":
        return added(self, other)


class StepSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step in this `epoch` of the engine core: its rows and tokens, how long it took, and how long the
    device was idle before it. Tokens beyond one per row are prompt tokens."""

    epoch: int
    rows: int
    tokens: int
    seconds: float
    gap_seconds: float = 0.0


class SchedulerStats(msgspec.Struct, frozen=True):
    """The load of an engine core; it travels with every step. `in_flight` steps are at the executor.
    `fairness_gap` is in weighted tokens. `prompt_token_seconds`: how much longer a prompt token makes a
    step, as measured; 0 until then."""

    running: Annotated[int, GaugeMetric("vllm:num_requests_running", "Sequences in the running batch.")] = 0
    waiting: Annotated[int, GaugeMetric("vllm:num_requests_waiting", "Sequences waiting to run.")] = 0
    pages_total: Annotated[int, GaugeMetric("personae:kv_pages", "KV pages in total.")] = 0
    pages_used: int = 0
    pages_lent: Annotated[
        int, GaugeMetric("personae:kv_pages_lent", "KV pages whose memory is lent to adapters.")
    ] = 0
    pages_kept: Annotated[int, GaugeMetric("personae:kv_pages_kept", "KV pages that sessions keep.")] = 0
    sessions: Annotated[int, GaugeMetric("personae:sessions", "Sessions that keep KV pages.")] = 0
    tier_pages: Annotated[int, GaugeMetric("personae:kv_tier_pages", "KV pages in the tier.")] = 0
    page_size: int = 0
    fairness_gap: Annotated[
        float,
        GaugeMetric(
            "personae:fairness_gap",
            "Weighted tokens between the most and the least served of the waiting keys.",
        ),
    ] = 0.0
    in_flight: int = 0
    prompt_token_seconds: float = 0.0
    counters: EngineCounters = msgspec.field(default_factory=EngineCounters)


def described(stats: msgspec.Struct) -> Iterator[tuple[Metric, Any]]:
    """The fields that `/metrics` shows, with their values."""
    for name, hint in _hints(type(stats)).items():
        if isinstance(metric := (get_args(hint) or (None,))[-1], Metric):
            yield metric, getattr(stats, name)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def added(one: T, other: T) -> T:
    """The sum of two values: numbers; tuples and structs of these, field by field; dicts, key by key."""
    return _sum(one, other)  # type: ignore[no-any-return]  # what T is


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, msgspec.Struct):
        return type(one)(*map(_sum, msgspec.structs.astuple(one), msgspec.structs.astuple(other)))
    if isinstance(one, tuple):
        return tuple(map(_sum, one, other))
    if isinstance(one, dict):
        return {name: one.get(name, 0) + other.get(name, 0) for name in {**other, **one}}
    return one + other
