"""The plan of a step, from the scheduler to the executor, and the step's result.

A plan has no tokens: the executor has each sequence's log since its admission, and the tokens sampled after
that are on the device. So a plan can be made before the previous step's tokens are known (lookahead).
"""

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from personae.engine.sequence import SequenceLog, TokenLogprobs

NOT_FINITE = "the model's logits are not finite"
NOTHING_ALLOWED = "no token is allowed next: the grammar and the logits exclude all tokens"


class Admission(msgspec.Struct, frozen=True):
    """A sequence takes a slot, with its current log (with emitted tokens after a preemption)."""

    slot: int
    log: SequenceLog


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step: positions `start` to `start + count - 1` are computed.

    The token at position p is `log.tokens[p]` if the admission's log has it, otherwise the token that this
    slot produced for p in an earlier step (if that step is not committed yet, `count` is 1). `samples`: the
    last position's logits choose a token, unless it is known; False for all chunks of a prompt but the last.
    `pages` are the page ids that are appended to the slot's page table before the step, in order. A table is
    empty at admission.

    After these positions the executor may compute up to `drafts` more, with guessed tokens (`speculation/`).
    The step keeps the right ones. How many that is, a plan made earlier cannot know. So `start` counts all
    drafts of the slot's earlier rows, and the executor, which knows better, begins at the slot's true
    position.
    """

    slot: int
    start: int
    count: int
    samples: bool
    pages: tuple[int, ...] = ()
    drafts: int = 0


class PageKey(NamedTuple):
    """A page as tiers know it: its name, the name of the page before it, and its tokens in bytes (see
    `scheduling/page_names.py`)."""

    name: bytes
    parent: bytes
    tokens: bytes


class PageOwner(NamedTuple):
    """The tenant to whose share of a tier a page counts: a digest of 16 bytes, and its weight. `session` is a
    digest of the session that the page is deleted with, if it has one."""

    tenant: bytes
    weight: float
    session: bytes = b""


class StorePage(msgspec.Struct, frozen=True, tag=True):
    """A tier gets what the page holds before the step."""

    page: int
    key: PageKey
    owner: PageOwner


class FetchPage(msgspec.Struct, frozen=True, tag=True):
    """The page gets what a tier has fetched: number `index` of the pages under `ticket`."""

    page: int
    ticket: int
    index: int


class ForgetSession(msgspec.Struct, frozen=True, tag=True):
    """A tier deletes the pages of this session; both are digests, see `PageOwner`."""

    tenant: bytes
    session: bytes


Move = StorePage | FetchPage | ForgetSession


class StepPlan(msgspec.Struct, frozen=True):
    """One step, in this order: `releases` (slots whose sequence ended), `moves` (all pages to store first,
    then the sessions to forget, then the pages to fetch), `admissions`, page `copies` (source, destination),
    one forward pass over `rows`, and sampling for the rows that need it.

    A plan may have no rows. For each time that a slot is in `reclaimed`, its page table loses its last page,
    before the rows' pages are appended.
    """

    step: int
    rows: tuple[Row, ...]
    admissions: tuple[Admission, ...] = ()
    releases: tuple[int, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    reclaimed: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()


class Drafted(NamedTuple):
    """What became of a row's drafts: how many were computed, how many were right, and who made them."""

    computed: int
    accepted: int
    source: str = ""


class ExpertBalance(msgspec.Struct, frozen=True):
    """How evenly groups of ranks have computed experts since the engine started: rows of the busiest group of
    each layer, and of a group in the mean. `moved`: how many experts went to another rank."""

    moved: int = 0
    busiest: float = 0.0
    mean: float = 0.0


class StepResult(msgspec.Struct, frozen=True):
    """The result of a step, in the order of the plan's rows.

    `tokens` has one entry per row: the new tokens, in order. These are the sampled token, then the tokens
    that it forces (`speculation/forced.py`), then those chosen after drafts. The entry is empty if the row
    did not sample. `drafted` has entries, by row index, for the rows with drafts. `logprobs` (one per token)
    and `prompt_logprobs` have entries, by row index, for the rows that requested them. `prompt_logprobs`
    covers the prompt tokens that follow the row's positions, preceded by None for the first token if the row
    starts at 0.

    `failures` has, by row index, the reason why a sequence cannot go on (its logits were not finite, or its
    grammar rejected every token). `codes` has the error's code, if it has one. `deferred` are rows that
    should have sampled but did not, because their grammar's mask is not ready, and later rows of these
    sequences that were already planned. They have no token, and their positions are planned again.
    `embeddings` has a vector (float32) for each row that completed a prompt with pooling. `resting`: drafts
    do not pay at present, so the next plans should have none. `experts`: see `Worker.expert_balance`.
    """

    step: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = {}
    failures: dict[int, str] = {}
    codes: dict[int, str] = {}
    deferred: frozenset[int] = frozenset()
    drafted: dict[int, Drafted] = {}
    embeddings: dict[int, bytes] = {}
    resting: bool = False
    experts: ExpertBalance | None = None


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """The sizes that scheduler and executor agree on: pages of `page_size` tokens, `max_seqs` slots.

    `lendable`: the memory of this many pages may be lent to adapters; the other pages hold a sequence of
    `max_model_len` tokens. Memory is lent in runs of `run` pages; a run begins at a multiple of `run`.
    `whole`: a page of the prefix cache is used as a whole or not, because it does not have all of its tokens.
    `regions`: pages lie in so many equal regions, one after the other, and all pages of a sequence in one of
    them. Each is the memory of a rank that has sequences of its own.
    """

    num_pages: int
    page_size: int
    max_seqs: int
    max_model_len: int
    max_batch_tokens: int
    lendable: int = 0
    run: int = 1
    whole: bool = False
    regions: int = 1

    @property
    def region_pages(self) -> int:
        """The pages of a region."""
        return self.num_pages // self.regions
