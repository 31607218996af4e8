"""What a worker is: one rank of the model, with its part of the weights, the KV cache and the adapters.

A worker is told plans, token ids, digests and paths, never tensors; only what it answers lies on its device.
So it can be one device, several that are one (`group.py`), or a process elsewhere.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from personae.engine.plan import MemoryLayout, StepPlan
from personae.engine.worker.known import KnownTokens
from personae.kernels.attention import AttentionBatch
from personae.lora.segments import LoraBatch
from personae.lora.source import AdapterSource
from personae.lora.stored import Pieces

Drafts = Mapping[int, tuple[tuple[int, ...], int]]
"""Of a step, by sample: the tokens, and where their logits begin among those of drafts."""

LogitMask = Callable[[], torch.Tensor | None]
"""Says which logits are looked at: a bitmask [S, ceil(V / 32)], None for all."""


def all_logits() -> None:
    """A LogitMask."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A plan as tensors. T tokens, B rows; `order[i]` is the plan's index of packed row i.

    tokens, positions: [T] int64; of the tokens those at `newest` [N] int64 are still to be read, the last
    ones of `newest_slots` [N] int64: the step before need not have chosen them until the forward pass begins.
    `sampled` [S] int64 are the packed positions whose logits choose a token, `sampled_rows` and
    `sampled_slots` the plan's row indices and slots they belong to, and `sampled_ends` the positions of the
    tokens that they choose. Behind them `sampled` has the positions of drafts: `drafts` maps an index among
    the S to its drafts and to where their logits begin among those of drafts.
    """

    tokens: torch.Tensor
    newest: torch.Tensor
    newest_slots: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    lora: LoraBatch | None
    sampled: torch.Tensor
    sampled_rows: list[int]
    sampled_slots: list[int]
    sampled_ends: list[int]
    offsets: list[int]
    order: list[int]
    drafts: Drafts


@dataclass(frozen=True, slots=True)
class Forward:
    """A step's outcome on the device: `hidden` [T, H] of every token, `logits` [S, V] float32 of sampled
    rows, those that are needed, and behind them those of drafts."""

    packed: PackedStep
    hidden: torch.Tensor
    logits: torch.Tensor


class AdapterTicket(Protocol):
    """An adapter that is to come to the device."""

    @property
    def digest(self) -> str:
        """The adapter's."""

    @property
    def missing(self) -> int:
        """How many KV pages' memory would let it in without another leaving; 0 if it is there, or nothing
        can be lent."""

    def pieces(self) -> Pieces:
        """Copy it to the device, a piece at a time, and hold it there: steps may run between the pieces, of
        other adapters. It may be held already.

        The first piece raises AdapterError, or Overloaded when there is no room now. If they end with
        something that is still done beside, no step may name the adapter before that; if that fails, it is to
        be discarded.
        """


class AdapterMemory(Protocol):
    """Adapters on a device: they come, are held, leave, and borrow memory of the KV cache."""

    @property
    def adapter_stats(self) -> tuple[int, int, int]:
        """Adapters on the device, how many were copied there, how many left for others."""

    def load_adapter(self, digest: str, source: AdapterSource, /) -> AdapterTicket:
        """Have an adapter brought from where it lies. Raises AdapterError when it is not there."""

    def discard(self, digest: str, /) -> None:
        """Undo a ticket whose pieces have ended: what is done beside has failed."""

    def release(self, digest: str, /) -> None:
        """The adapter may be evicted; nothing if it is not held."""

    def lending(self, pages: tuple[int, ...], /) -> Iterator[None]:
        """Adapters may have the memory of these KV pages, whole runs, which no later step touches: after the
        last piece."""

    def repay(self, count: int, /) -> tuple[int, ...]:
        """Up to `count` of the pages that were lent, or whole runs of them, as far as adapters that nobody
        holds can leave. They may be used after the last piece of `giving_back`."""

    def giving_back(self, pages: tuple[int, ...], /) -> Iterator[None]:
        """Let go of memory that adapters have left, for these pages, a piece at a time."""


class Worker(AdapterMemory, Protocol):
    """Computes steps in the order in which they begin; one thread calls it."""

    @property
    def device(self) -> torch.device:
        """Where its logits lie."""

    @property
    def layout(self) -> MemoryLayout:
        """The sizes of the cache and of steps."""

    @property
    def vocab_size(self) -> int:
        """Of the logits."""

    def begin(self, plan: StepPlan, known: KnownTokens, /) -> PackedStep | None:
        """Take in what the plan changes, and pack its rows, if it has any."""

    def forward(
        self,
        packed: PackedStep,
        overlap: Callable[[], None] | None = None,
        logit_mask: LogitMask = all_logits,
        /,
    ) -> Forward:
        """Run the model over the rows that were packed last. `overlap` is for a CPU: this thread does it when
        others have begun to compute. Then `logit_mask` is asked."""

    def prompt_logits(self, forward: Forward, slot: int, first: int, count: int, /) -> torch.Tensor:
        """The logits [count, V] of packed tokens from `first` on, all of one slot."""

    def hidden_states(self, forward: Forward, first: int, count: int, /) -> torch.Tensor:
        """The hidden states [count, H] float32, behind the last norm, of packed tokens from `first` on."""

    def commit(self, slots: torch.Tensor, tokens: torch.Tensor, /) -> None:
        """The newest tokens of these slots, which the next step may begin with. Both [n] int64, on the
        device."""
