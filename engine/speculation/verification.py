"""Verifies drafts: each position's token is chosen as it would be without drafts.

A token is a function of logits, parameters, seed and position. One forward pass gives the logits of all
positions of a draft. Those after a right guess equal the logits of a separate step. So each position's token
is chosen from its own logits with its own noise, mask and penalties. The chosen tokens are kept for as long
as the draft agrees, including the first that differs.

Masks and penalties depend on the tokens before. Rows that have some are chosen position by position: a mask
takes longer than a choice, and those after a wrong draft would be made in vain. For other rows all positions
are chosen at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from personae.engine.sampled_tokens import TokenChoices
from personae.engine.sampler import Sampler
from personae.engine.sequence import TokenLogprobs
from personae.engine.speculation.forced import JumpForward
from personae.grammar.masks import BitmaskPool, fill_masks, verifying
from personae.grammar.matcher import Binding
from personae.kernels.upload import upload


@dataclass(slots=True)
class DraftRow:
    """A row with drafts, as far as it is verified. `tokens` are its tokens after the first; the last of them
    is `open` if its grammar has not taken it yet. `at` is the position of the token checked last."""

    slot: int
    at: int
    drafts: tuple[int, ...]
    first: int  # where the drafts' logits begin
    matcher: Binding | None
    jump: JumpForward | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    accepted: int = 0
    open: bool = True
    refused: int | None = None


class Slots(NamedTuple):
    """Access to slots: `known` gives the token at a position, if it is known; `ends` says whether a token
    ends its sequence; `extend` records forced tokens from a position on."""

    known: Callable[[int, int], int | None]
    ends: Callable[[int, int, int], bool]
    extend: Callable[[int, int, tuple[int, ...]], None]


def verify(
    rows: Mapping[int, DraftRow],
    chosen: list[int | None],
    logits: Tensor,
    sampler: Sampler,
    bitmasks: BitmaskPool,
    slots: Slots,
) -> None:
    """Verify the drafts of `rows`, by sample, whose first tokens were `chosen`. logits: those of drafts; they
    may be overwritten.

    It reads tokens before it goes on, so it waits for a GPU.
    """
    begun = [row for index, row in rows.items() if _next(row, chosen[index], slots)]
    free: list[DraftRow] = []
    going: list[DraftRow] = []
    for row in begun:
        depends = row.matcher is not None or sampler.has_penalties(row.slot)
        (going if depends else free).append(row)
    if free:
        _verify_at_once(free, logits, sampler, slots)
    while going:
        tokens = _choose(going, logits, sampler, bitmasks)
        going = [row for row, token in zip(going, tokens, strict=True) if _next(row, token, slots)]
    emitted = [row for row in begun if row.tokens]
    if emitted:
        sampler.commit([row.slot for row in emitted], [row.tokens[-1] for row in emitted])


def _verify_at_once(rows: list[DraftRow], logits: Tensor, sampler: Sampler, slots: Slots) -> None:
    """Verify rows whose choices do not depend on the tokens before: all positions are chosen at once."""
    counts = [len(row.drafts) - row.accepted + 1 for row in rows]
    spread = [(row, i) for row, count in zip(rows, counts, strict=True) for i in range(count)]
    read = sampler.choose(
        _at(logits, [row.first + row.accepted - 1 + i for row, i in spread]),
        [row.slot for row, _ in spread],
        [row.at + 1 + i for row, i in spread],
    )
    begin = 0
    for row, count in zip(rows, counts, strict=True):
        for i in range(begin, begin + count):
            if not _next(row, _emit(row, read, i), slots):
                break
        begin += count


def _choose(
    rows: list[DraftRow],
    logits: Tensor,
    sampler: Sampler,
    bitmasks: BitmaskPool,
) -> list[int | None]:
    """The token after the last right draft of each row; None if it cannot be chosen now."""
    matchers = [row.matcher for row in rows]
    bitmask = None
    if any(matchers):
        bitmask = bitmasks.acquire()
        fill_masks(bitmask, matchers)
    read = sampler.choose(
        _at(logits, [row.first + row.accepted - 1 for row in rows]),
        [row.slot for row in rows],
        [row.at + 1 for row in rows],
        None if bitmask is None else bitmask[: len(rows)],
        verifying(matchers),
    )
    if bitmask is not None:
        bitmasks.release(bitmask)
    return [_emit(row, read, i) for i, row in enumerate(rows)]


def _at(logits: Tensor, places: list[int]) -> Tensor:
    """`logits[places]`; a view where possible, because a copy takes longer than a choice."""
    first, last = places[0], places[-1]
    if places == [*range(first, last + 1)]:
        return logits[first : last + 1]
    return logits[upload(np.array(places), logits.device)]


def _emit(row: DraftRow, read: TokenChoices, i: int) -> int | None:
    """Append the token at `i`, if there is one, to the row's tokens."""
    token = read.tokens[i]
    if token is not None:
        row.at += 1
        row.tokens.append(token)
        row.open = True
        if i in read.logprobs:
            row.logprobs.append(read.logprobs[i])
    return token


def _next(row: DraftRow, token: int | None, slots: Slots) -> bool:
    """Whether the position after `token`, the row's last, must be chosen from the logits of a draft."""
    while token is not None and row.accepted < len(row.drafts) and row.drafts[row.accepted] == token:
        if slots.ends(row.slot, row.at, token):
            return False
        if row.open and not _take(row, token, slots):
            return False
        row.accepted += 1
        token = slots.known(row.slot, row.at + 1)
        if token is None:
            return True
        row.at += 1
    return False


def _take(row: DraftRow, token: int, slots: Slots) -> bool:
    """Advance the grammar by the token, and record the tokens that it forces."""
    row.open = False
    if row.jump is not None:
        brought = row.jump.take(token)
        if brought is not None and len(brought) > 1:
            row.tokens += brought[1:]
            slots.extend(row.slot, row.at, brought)
        taken = brought is not None
    else:
        taken = row.matcher is None or row.matcher.terminated or row.matcher.accept(token)
    if not taken:
        row.refused = token
    return taken
