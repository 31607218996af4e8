"""A sequence that the scheduler handles: its growing log, and what it holds."""

from enum import Enum, auto
from typing import NamedTuple

import msgspec

from personae.engine.plan import MemoryLayout, PageKey
from personae.engine.scheduling.fairness import FairnessKey
from personae.engine.scheduling.page_names import Token, root_key
from personae.engine.scheduling.prefix import CacheHandle
from personae.engine.scheduling.regions import Region
from personae.engine.sequence import SequenceLog


class SequenceState(Enum):
    """The state of a sequence. It has exactly one at any time."""

    FOLLOWING = auto()  # waits for its leader's prompt
    FETCHING = auto()  # waits for pages that a tier has
    WAITING = auto()  # in the waiting queue, may be admitted
    RUNNING = auto()  # has a slot
    RETURNING = auto()  # preempted, and rows of its last admission are still in flight
    ENDED = auto()


PRIORITY_STEP = 64  # a priority level counts as this many later arrivals, so that nothing waits forever


def turn(log: SequenceLog, order: int) -> int:
    """The position of a sequence in its key's queue. `order`: its arrival number there."""
    return order + PRIORITY_STEP * log.priority


class StagedPages(NamedTuple):
    """Pages of a sequence that a tier fetches or has fetched: numbers `first` to `end` - 1."""

    ticket: int
    first: int
    end: int


class LiveSequence:
    """Plain data, which the scheduler changes.

    Three counts describe its progress. Positions below `computed` are committed. Positions below `planned`
    are computed or in flight, or would be if all drafts in flight were right. No position from `last` on is
    ever planned (the token that ends a sequence is not computed). `budget_end` is how many tokens the log has
    at most, `limit` how many here. The log had `known` tokens at admission: up
    to there it is prefill.
    """

    __slots__ = (
        "admitted",
        "background",
        "budget_end",
        "cached",
        "capacity",
        "charged",
        "computed",
        "delivered",
        "drafts",
        "followers",
        "forgotten",
        "gave_up_for",
        "handle",
        "id",
        "key",
        "keys",
        "known",
        "last",
        "limit",
        "log",
        "order",
        "pages",
        "parked",
        "place",
        "planned",
        "prompt_logprobs_sent",
        "publish_at",
        "region",
        "root",
        "settled",
        "slot",
        "staged",
        "stale",
        "stop_after",
        "stops",
        "tokens",
        "tried_tier",
        "turn",
        "was_preempted",
    )

    def __init__(self, log: SequenceLog, order: int, layout: MemoryLayout) -> None:
        params = log.params
        self.log = log
        self.id = log.id
        self.key = FairnessKey(log.tenant, log.adapter, log.background, log.weight)
        self.background = log.background
        self.root = root_key(log.salt, None if log.adapter_start else log.adapter)
        self.order = order
        self.turn = 0  # its position in the queue of its key
        self.place = SequenceState.WAITING
        self.tokens = list(log.tokens)
        self.followers: list[LiveSequence] = []

        self.budget_end = log.prompt_length + log.budget(layout.max_model_len)
        self.limit = min(self.budget_end, len(log.tokens) + 1) if log.prefill else self.budget_end
        self.last = self.limit - 1
        self.stops = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else log.eos)
        self.stop_after = log.prompt_length + params.min_tokens

        self.was_preempted = False  # its slot went to a tenant that had less than its share
        # For whom it last gave up its slot or memory, and how many tokens it had then.
        self.gave_up_for: tuple[str | None, int] | None = None
        self.settled = False  # admitted although others wait: these may not preempt it
        self.charged = False  # its input is charged once, however often it is preempted
        self.delivered = False  # its first delta was sent
        self.cached = 0
        self.prompt_logprobs_sent = 0

        self.keys: list[PageKey] = []  # of its first pages, as far as a tier was asked for them
        self.forgotten = False  # its session is deleted: nothing of it is kept when it ends
        self.tried_tier = False  # since it began to wait
        self.staged: StagedPages | None = None

        self.slot: int | None = None
        self.admitted = 0
        self.handle: CacheHandle | None = None
        self.region: Region | None = None  # that has its pages
        self.pages: list[int] = []
        self.capacity = 0
        self.known = 0
        self.planned = 0
        self.computed = 0
        self.publish_at = 0
        self.parked = False  # its grammar's mask is not ready: no row is planned until it is
        self.stale = 0  # rows in flight that were planned before it was parked
        self.drafts = 0  # how many drafts a row may have

    @property
    def rank(self) -> tuple[bool, int]:
        """The order of running sequences: background after all others, then by admission."""
        return self.background, self.admitted

    @property
    def reads_cache(self) -> bool:
        """Whether it may use cached pages. Prompt logprobs need the logits of every position, so nothing is
        skipped until all are delivered. A mean needs every hidden state, and comes with the last."""
        if self.log.params.pooling == "mean":
            return False
        delivered = self.prompt_logprobs_sent >= self.log.prompt_length
        return self.log.params.prompt_logprobs is None or delivered

    @property
    def doubled(self) -> bool:
        """Whether it has own pages for tokens that another sequence published first, and holds that one's
        pages too."""
        nodes = () if self.handle is None else self.handle.nodes
        return any(node.page != page for node, page in zip(nodes, self.pages, strict=False))

    def cache_key(self, tokens: tuple[int, ...], start: int) -> tuple[Token, ...]:
        """The log's `tokens` from position `start` on, as the prefix cache keys them.

        The token at which the adapter becomes active carries its digest. The pages before it are the base's
        and shared with it; from there on they are the adapter's own.
        """
        log = self.log
        at = log.adapter_start - start
        if not log.adapter_start or log.adapter is None or not 0 <= at < len(tokens):
            return tokens
        return (*tokens[:at], (log.adapter, tokens[at]), *tokens[at + 1 :])

    def current_log(self) -> SequenceLog:
        """The log with all tokens emitted so far."""
        if len(self.tokens) == len(self.log.tokens):
            return self.log
        return msgspec.structs.replace(self.log, tokens=tuple(self.tokens))

    def cached_once(self) -> int | None:
        """The cached prompt tokens for the first delta, None after that."""
        if self.delivered:
            return None
        self.delivered = True
        return self.cached

    def ending(self) -> str | None:
        """The finish reason after the last token; None if the sequence goes on."""
        count = len(self.tokens)
        if count > self.stop_after and self.tokens[-1] in self.stops:
            return "stop"
        if count < self.limit:
            return None
        return "length" if count >= self.budget_end else "prefilled"
