"""The worker: one rank of the model, with its part of the weights, the KV cache and the adapters.

A worker gets plans, token ids, digests and paths, never tensors; only its results lie on its device. So it
can be one device, several that act as one (`group.py`), or a process elsewhere.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from personae.engine.layers.step import RankShare, StepHalf, StepPart
from personae.engine.parallel.expert_placement import LayerExperts, Placement
from personae.engine.parallel.pipeline import Incoming
from personae.engine.plan import ExpertBalance, MemoryLayout, StepPlan
from personae.engine.worker.known import KnownTokens
from personae.kernels.attention import AttentionBatch
from personae.lora.segments import LoraBatch
from personae.lora.source import AdapterSource
from personae.lora.stored import Pieces

Drafts = Mapping[int, tuple[tuple[int, ...], int]]
"""The drafts of a step, by sample: the tokens, and where their logits begin among the logits of drafts."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A plan as tensors. T tokens, B rows; `order[i]` is the plan's index of packed row i.

    tokens, positions: [T] int64. The tokens at `newest` [N] int64 are not known yet: they are the last tokens
    of the slots `newest_slots` [N] int64, so the step before need not have chosen them until the forward pass
    begins.

    `sampled` [S] int64 has the packed positions whose logits choose a token. `sampled_rows` and
    `sampled_slots` are the plan's row indices and slots of these, and `sampled_ends` are the positions of the
    chosen tokens. After the S positions, `sampled` has those of the drafts. `drafts` maps an index among the
    S to its drafts, and to where their logits begin among the logits of drafts. `parts`: what is computed
    at a time; empty if that is the whole step. `share`: this rank's rows, if each rank has
    sequences of its own; the rows of a rank are neighbours, and `attention` is of no use then. `halves`: of
    such a step, which are computed in turns; empty if it is computed at once. Otherwise `parts` are.
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
    parts: tuple[StepPart, ...] = ()
    share: RankShare | None = None
    halves: tuple[StepHalf, ...] = ()


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What the layers make of a step's tokens: `states` [T, H]. `arrival`: when they have come from other
    stages; None if they are here."""

    packed: PackedStep
    states: torch.Tensor
    arrival: Incoming | None = None

    @property
    def arrived(self) -> bool:
        """Whether they are here."""
        return self.arrival is None or self.arrival.done()


@dataclass(frozen=True, slots=True)
class Forward:
    """The result of a step on the device: `hidden` [T, H] of every token, and `logits` float32 [S, V] of the
    sampled rows as far as they are needed, followed by the logits of drafts."""

    packed: PackedStep
    hidden: torch.Tensor
    logits: torch.Tensor


class AdapterTicket(Protocol):
    """An adapter that is being loaded to the device."""

    @property
    def digest(self) -> str:
        """The adapter's digest."""

    @property
    def missing(self) -> int:
        """How many more KV pages of memory it needs so that no other adapter is evicted; 0 if it is on the
        device, or if the KV cache cannot lend."""

    def pieces(self) -> Pieces:
        """Copy it to the device piece by piece and pin it there. Steps with other adapters may run between
        the pieces. It may be pinned already.

        The first piece raises AdapterError, or Overloaded if there is no room now. The pieces may end with a
        future for work that continues in the background: no step may use the adapter before that is done, and
        if it fails, `discard` must undo it.
        """


class AdapterMemory(Protocol):
    """The adapters on a device: loading, pinning, evicting, and borrowing memory from the KV cache."""

    @property
    def adapter_stats(self) -> tuple[int, int, int]:
        """How many adapters are on the device, how many loads there were, how many evictions."""

    def load_adapter(self, digest: str, source: AdapterSource, /) -> AdapterTicket:
        """Have an adapter read from its source. Raises AdapterError if the source does not have it."""

    def discard(self, digest: str, /) -> None:
        """Undo a ticket whose pieces have ended but whose background work has failed."""

    def release(self, digest: str, /) -> None:
        """Unpin the adapter, so that it may be evicted. Does nothing if it is not pinned."""

    def lending(self, pages: tuple[int, ...], /) -> Iterator[None]:
        """Lend the memory of these KV pages to adapters, after the last piece. The pages are whole runs, and
        no later step uses them."""

    def recall(self, count: int, /) -> tuple[int, ...]:
        """Up to `count` of the lent pages, rounded up to whole runs, as far as unpinned adapters can be
        evicted. The cache may use them after the last piece of `returning`."""

    def returning(self, pages: tuple[int, ...], /) -> Iterator[None]:
        """Free the memory of evicted adapters for these pages, piece by piece."""


class ExpertMemory(Protocol):
    """The experts of a rank that move between ranks. Layers have their numbers in the whole model; a rank
    does nothing for a layer that it does not have."""

    def layers(self) -> dict[int, LayerExperts]:
        """The experts of the rank's layers, with the rows that all groups' experts have had since the last
        call."""

    def reading(self, layer: int, placement: Placement, /) -> Iterator[None]:
        """Read the experts that come to the rank with a layer's new placement, a tensor at a time. Raises
        ModelLoadError if the files cannot be read or have changed."""

    def place(self, layer: int, placement: Placement, /) -> None:
        """Use the placement, whose experts have been read. All ranks do so between the same two steps."""


class Worker(AdapterMemory, Protocol):
    """Computes steps in the order in which they begin. One thread calls it."""

    @property
    def experts(self) -> ExpertMemory | None:
        """The experts that move between ranks; None if none do."""

    @property
    def expert_balance(self) -> ExpertBalance | None:
        """How evenly groups of ranks have computed experts; None if experts stay where they are."""

    @property
    def device(self) -> torch.device:
        """Where its logits lie."""

    @property
    def layout(self) -> MemoryLayout:
        """The sizes of the cache and of steps."""

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""

    def begin(self, plan: StepPlan, known: KnownTokens, /) -> PackedStep | None:
        """Apply the plan's changes, and pack its rows, if it has any."""

    def forward(self, packed: PackedStep, overlap: Callable[[], None] | None = None, /) -> HiddenStates:
        """Run the layers over the rows that were packed last. `overlap` is for a CPU: this thread calls it
        while other threads compute."""

    def logits(self, hidden: HiddenStates, logit_mask: torch.Tensor | None = None, /) -> Forward:
        """The logits of the oldest step without: its hidden states, for which this waits. `logit_mask`: which
        are needed, a bitmask [S, ceil(V / 32)]; None for all."""

    def prompt_logits(self, forward: Forward, slot: int, first: int, count: int, /) -> torch.Tensor:
        """The logits [count, V] of packed tokens from `first` on, all of one slot."""

    def hidden_states(self, forward: Forward, first: int, count: int, /) -> torch.Tensor:
        """The hidden states [count, H] float32, after the final norm, of packed tokens from `first` on."""

    def commit(self, slots: torch.Tensor, tokens: torch.Tensor, /) -> None:
        """Set the newest tokens of these slots, which the next step may begin with. Both [n] int64, on the
        device."""
