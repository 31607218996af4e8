"""What the scheduler asks of the executor in one step, and what comes back.

No token travels in a plan: the executor has each sequence's log since its admission, and the tokens sampled
after that lie on the device. So a plan can be made before the previous step's tokens are known (lookahead).
"""

from dataclasses import dataclass

import msgspec

from personae.engine.sequence import SequenceLog, TokenLogprobs

NOT_FINITE = "the model's logits are not finite"
NOTHING_ALLOWED = "no token is allowed next: the grammar and the logits exclude all of them"


class Admission(msgspec.Struct, frozen=True):
    """A sequence takes a slot, with its log as it is now (emitted tokens included after a preemption)."""

    slot: int
    log: SequenceLog


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step: positions `start` to `start + count - 1` are computed.

    The token at position p is `log.tokens[p]` where the admission's log has it, else the one that this slot
    brought for position p in an earlier step (if that is not committed yet, `count` is 1). `samples` says
    that the last position's logits choose a token, if none is known; False for all chunks but the last.
    `pages` are the page ids appended to this slot's page table before the step, in order; a table starts
    empty at admission.

    Behind these positions the executor may compute up to `drafts` more, of tokens that it guesses
    (`speculation/`); the step keeps those that turn out to be right. How many that is, a plan made before
    cannot know: so `start` counts all drafts of the slot's earlier rows, and the executor, which knows
    better, begins where the slot is.
    """

    slot: int
    start: int
    count: int
    samples: bool
    pages: tuple[int, ...] = ()
    drafts: int = 0


class StepPlan(msgspec.Struct, frozen=True):
    """One step: first `releases` (slots whose sequence ended), then `admissions`, page `copies` (source,
    destination), then one forward pass over `rows`, then sampling for the rows that ask for it. A plan may
    have no rows. Each time that a slot is among `reclaimed`, its page table loses its last page, before the
    rows' pages are appended."""

    step: int
    rows: tuple[Row, ...]
    admissions: tuple[Admission, ...] = ()
    releases: tuple[int, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    reclaimed: tuple[int, ...] = ()


class StepResult(msgspec.Struct, frozen=True):
    """What a step brought, in the order of the plan's rows.

    `tokens` has one entry per row: the tokens that it brought, in order. That is the sampled one; then those
    that follow it by themselves (`speculation/forced.py`), and those that were chosen behind drafts. None
    where the row did not sample, or its next token was known. `drafted` says by row index how many drafts
    were computed and how many of them were right; a row that is not listed had none. `logprobs` (one for each
    token) and
    `prompt_logprobs` have entries (by row index) only for rows that asked: the prompt tokens that follow
    the row's positions, and before them None for the first token where the row starts at 0. `failures` maps
    a row index to the reason why its sequence cannot go on (its logits were not finite, its grammar refused
    every token); `codes` has the code of an error of its own, where there is one. `deferred` are rows that
    were to sample and did not, since their grammar's mask is still being made, and later rows of such
    sequences that were planned by then: they have no token, and the same position is planned again.
    `embeddings` has a vector (float32) for each row with which a prompt ended that asked for one.
    """

    step: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = {}
    failures: dict[int, str] = {}
    codes: dict[int, str] = {}
    deferred: frozenset[int] = frozenset()
    drafted: dict[int, tuple[int, int]] = {}
    embeddings: dict[int, bytes] = {}


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """The sizes that scheduler and executor agree on: pages of `page_size` tokens, `max_seqs` slots.

    `lendable`: the memory of so many pages may be lent to adapters; the others hold a sequence of
    `max_model_len` tokens. It is lent by runs: `run` pages, of which the first is a multiple of that number.
    """

    num_pages: int
    page_size: int
    max_seqs: int
    max_model_len: int
    max_batch_tokens: int
    lendable: int = 0
    run: int = 1
