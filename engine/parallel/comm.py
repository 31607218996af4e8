"""What the ranks of one model exchange while they compute: sums and parts, in shared memory on a CPU.
`process_groups.py` has the same for GPUs.

Ranks share each layer (tensor parallelism), or have different layers (pipeline parallelism, `pipeline.py`),
or both: then each stage of the pipeline has as many ranks, which share its layers.

The ranks of a stage make the same calls in the same order. A sum adds the ranks' parts in the order of their
numbers, element by element. So all ranks get the same bits, and a row's bits do not depend on the other rows.
(gloo's `all_reduce` has neither with three ranks or more.)
"""

import mmap
import os
import time
from collections.abc import Callable
from threading import Lock, local
from typing import Protocol

import torch
from torch import Tensor

from personae.engine.parallel import shared_file
from personae.engine.parallel.expert_placement import NO_GROUPS, ExpertGroups
from personae.engine.parallel.shared_file import COUNTER_STEP
from personae.engine.parallel.two_batches import TwoBatches
from personae.kernels.decoder import RankSums

_SPINS, _YIELDS = 50, 100  # a rank that waits longer naps: it may have the core that another needs
_NAP_SECONDS = 0.00002
_CHECK_SECONDS = 0.05


class Collectives(Protocol):
    """Some ranks, and what they exchange."""

    @property
    def rank(self) -> int:
        """This rank's number among them, from 0."""

    @property
    def size(self) -> int:
        """How many they are."""

    def all_reduce(self, x: Tensor, /) -> Tensor:
        """The sum of all ranks' x, of one shape and dtype: rounded once to it, and written to x if x is
        contiguous."""

    def all_gather(self, x: Tensor, widths: list[int], /) -> Tensor:
        """[rows, width] of each rank -> [rows, sum of widths], in the order of the ranks. `widths` has the
        width of each."""


class Comm(Collectives, Protocol):
    """The ranks that compute one model together: those of a stage, which share each layer."""

    @property
    def stage(self) -> int:
        """The number of this rank's stage, from 0. Stage 0 has the embedding and the output matrix, too."""

    @property
    def stages(self) -> int:
        """How many stages the layers are divided into."""

    @property
    def expert_groups(self) -> ExpertGroups:
        """How the ranks that share a layer divide its experts."""

    @property
    def attention_ranks(self) -> int:
        """How many ranks, the first ones, have sequences of their own, and the whole of each layer's
        attention for them (data-parallel attention); 0 if all share attention. All ranks share the MLPs, or
        if there are more than these, the others do."""

    @property
    def sharing(self) -> Collectives:
        """The ranks that have other parts of the layers' blocks: all, or of two kinds those of its kind."""

    @property
    def group(self) -> Collectives:
        """The ranks that have other parts of this rank's experts."""

    @property
    def two_batches(self) -> TwoBatches | None:
        """How the halves of a step take turns (two-batch overlap); None if a step has no halves."""

    @property
    def sums(self) -> RankSums | None:
        """Where a decoder that runs all layers in one call adds up the ranks' parts; None for one rank."""

    def gather_rows(self, x: Tensor, counts: list[int], takers: range | None = None, /) -> Tensor:
        """[rows, width] of each rank -> [sum of rows, width], in the order of the ranks. `counts` has the
        rows of each. `takers`: the ranks that get the rows, by default all; the others get none, [0, width].
        """

    def reduce_scatter(self, x: Tensor, counts: list[int], givers: range | None = None, /) -> Tensor:
        """The sum of the givers' x [sum of rows, width], as `all_reduce` has it -> this rank's rows of it,
        [rows, width]. `counts` has the rows of each rank. `givers`: by default all ranks; the x of others
        only has the width."""


class OneRank:
    """A model on one device: there is nobody to exchange anything with."""

    rank, size = 0, 1
    stage, stages = 0, 1
    expert_groups = NO_GROUPS
    attention_ranks = 0
    two_batches: TwoBatches | None = None
    sums: RankSums | None = None

    @property
    def sharing(self) -> Collectives:
        """See Comm."""
        return self

    @property
    def group(self) -> Collectives:
        """See Comm."""
        return self

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Comm."""
        return x

    def all_gather(self, x: Tensor, widths: list[int]) -> Tensor:
        """See Comm."""
        return x

    def gather_rows(self, x: Tensor, counts: list[int], takers: range | None = None) -> Tensor:
        """See Comm."""
        return x

    def reduce_scatter(self, x: Tensor, counts: list[int], givers: range | None = None) -> Tensor:
        """See Comm."""
        return x


ONE_RANK = OneRank()


class Unconnected(OneRank):
    """A rank that does not compute, to ask what it would have."""

    def __init__(
        self,
        rank: int,
        size: int,
        stage: int,
        stages: int,
        expert_groups: ExpertGroups,
        *,
        attention_ranks: int = 0,
    ) -> None:
        self.rank, self.size = rank, size
        self.stage, self.stages = stage, stages
        self.expert_groups, self.attention_ranks = expert_groups, attention_ranks


def kinds(size: int, attention_ranks: int) -> list[range]:
    """The ranks of each kind, which have parts of the same blocks: all, or those with attention and those
    with MLPs."""
    if attention_ranks in (0, size):
        return [range(size)]
    return [range(attention_ranks), range(attention_ranks, size)]


def subgroups(rank: int, size: int, expert_groups: ExpertGroups, attention_ranks: int) -> tuple[range, range]:
    """Two groups that this rank belongs to: the ranks that share its blocks, and the ranks that share its
    experts."""
    [kind] = [kind for kind in kinds(size, attention_ranks) if rank in kind]
    each = max(len(kind) // expert_groups.number, 1)
    first = rank - (rank - kind.start) % each
    return kind, range(first, first + each)


class OwnRows(OneRank):
    """What blocks that ranks share exchange where some have sequences of their own: the tokens of all come
    in, and each rank gets the sum for its own tokens. `inner`: what the ranks exchange otherwise.

    `counts`: how many tokens of the step each rank has. Set it before each step, or in each of the threads
    that compute its halves.
    """

    def __init__(self, inner: Comm) -> None:
        self.rank, self.size, self.expert_groups = inner.sharing.rank, inner.sharing.size, inner.expert_groups
        self._inner, self._step = inner, local()
        self._sharing = kinds(inner.size, inner.attention_ranks)[-1]

    @property
    def group(self) -> Collectives:
        """See Comm."""
        return self._inner.group

    @property
    def counts(self) -> list[int]:
        """See above."""
        counts: list[int] = self._step.counts
        return counts

    @counts.setter
    def counts(self, counts: list[int]) -> None:
        self._step.counts = counts

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the x [T, width] of the ranks that share the block, for this rank's tokens."""
        return self._inner.reduce_scatter(x, self.counts, self._sharing)

    def all_gather(self, x: Tensor, widths: list[int]) -> Tensor:
        """See Comm: of all ranks' tokens."""
        return self._inner.sharing.all_gather(x, widths)

    def gather(self, x: Tensor) -> Tensor:
        """[tokens of this rank, width] -> [T, width], in the order of the ranks; [0, width] on a rank that
        has no part of the block."""
        return self._inner.gather_rows(x, self.counts, self._sharing)


class _Area:
    """An area of the ranks' file (`shared_file.py`), as one rank has it. `members`: the ranks that use it.
    `count`: how many parts this rank has given."""

    def __init__(self, memory: mmap.mmap, ranks: int, number: int, members: range) -> None:
        size, slots = shared_file.parts_bytes(ranks), 2 * ranks * shared_file.SLOT_BYTES
        first = number * size
        self.counters = memoryview(memory)[first : first + 8 * COUNTER_STEP * ranks].cast("q")
        self.count = 0
        self._ranks, self._members = ranks, members
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8, offset=first + size - slots, count=slots)
        self._slots: dict[torch.dtype, list[list[Tensor]]] = {}

    def slots(self, dtype: torch.dtype) -> list[Tensor]:
        """The members' slots for the part that is given now."""
        found = self._slots.get(dtype)
        if found is None:
            parts = self._bytes.view(dtype).view(2, self._ranks, -1)
            found = [list(half[self._members.start : self._members.stop]) for half in parts]
            self._slots[dtype] = found
        return found[self.count % 2]


class Parts:
    """Some ranks that exchange parts of tensors in an area of their file. One thread of each calls it at a
    time.

    Each rank has a counter of the parts that it has given, and two slots, which it uses in turn: it can give
    the next part while others still read the last one. `members`: the ranks' numbers in the file. `check` is
    called regularly while this rank waits; it raises an error if another rank has ended. `two_batches`: how
    the halves of a step take turns. Each half has an area of its own, and lets the other run once in each
    call: so the second half is never ahead of the first.

    `given`: how many bytes this rank has given so far.
    """

    def __init__(
        self, number: int, members: range, check: Callable[[], None], two_batches: TwoBatches | None = None
    ) -> None:
        self.rank, self.size = members.index(number), len(members)
        self.two_batches = two_batches
        self.given = 0
        self._number, self._members = number, members
        self._check = check
        self._fence = Lock()

    def open_areas(self, memory: mmap.mmap, ranks: int, *areas: int) -> None:
        """Begin anew in these areas of a file of so many ranks, which all members open."""
        self._areas = [_Area(memory, ranks, area, self._members) for area in areas]

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Collectives."""
        whole = x.contiguous()
        flat = whole.view(-1)
        step = shared_file.SLOT_BYTES // x.element_size()
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            slots = self._exchange(part, first=not start)
            count = part.numel()
            add_up([slot[:count] for slot in slots], part)
        return whole

    def all_gather(self, x: Tensor, widths: list[int]) -> Tensor:
        """See Collectives."""
        found = torch.empty(x.shape[0], sum(widths), dtype=x.dtype)
        rows = max(shared_file.SLOT_BYTES // (max(widths) * x.element_size()), 1)
        for start in range(0, x.shape[0], rows):
            part = x[start : start + rows]
            slots = self._exchange(part.reshape(-1), first=not start)
            for columns, slot, width in zip(
                torch.split(found[start : start + rows], widths, 1), slots, widths, strict=True
            ):
                columns.copy_(slot[: len(part) * width].view(-1, width))
        return found

    def gather_rows(self, x: Tensor, counts: list[int], takers: range | None = None) -> Tensor:
        """See Comm."""
        width, takes = x.shape[1], takers is None or self.rank in takers
        found = torch.empty(sum(counts) if takes else 0, width, dtype=x.dtype)
        rows = max(shared_file.SLOT_BYTES // (width * x.element_size()), 1)
        for start in range(0, max(counts), rows):
            slots = self._exchange(x[start : start + rows].reshape(-1), first=not start)
            for own, slot in zip(torch.split(found, counts) if takes else (), slots, strict=takes):
                part = own[start : start + rows]
                part.copy_(slot[: part.numel()].view_as(part))
        return found

    def reduce_scatter(self, x: Tensor, counts: list[int], givers: range | None = None) -> Tensor:
        """See Comm."""
        givers = range(self.size) if givers is None else givers
        width, flat, gives = x.shape[1], x.reshape(-1), self.rank in givers
        total, first = sum(counts) * width, sum(counts[: self.rank]) * width
        last = first + counts[self.rank] * width
        found = torch.empty(counts[self.rank], width, dtype=x.dtype)
        step = shared_file.SLOT_BYTES // x.element_size()
        for start in range(0, total, step):
            part = flat[start : start + step] if gives else flat[:0]
            low, high = (min(max(bound - start, 0), min(step, total - start)) for bound in (first, last))
            slots = self._exchange(part[:low], (high, part[high:]), first=not start)
            parts = [part[low:high] if giver == self.rank else slots[giver][low:high] for giver in givers]
            add_up(parts, found.view(-1)[start + low - first : start + high - first])
        return found

    def _exchange(
        self, part: Tensor, further: tuple[int, Tensor] | None = None, *, first: bool
    ) -> list[Tensor]:
        """Give a part [n], and wait for those of all members. `further`: another part, and where it begins.
        `first`: of a call. Returns the members' slots, which have them, valid until the next but one call."""
        area = self._areas[0 if self.two_batches is None else self.two_batches.now]
        area.count = count = area.count + 1
        slots, counters = area.slots(part.dtype), area.counters
        for at, each in ((0, part),) if further is None else ((0, part), further):
            self.given += each.numel() * each.element_size()
            slots[self.rank][at : at + each.numel()].copy_(each)
        self._order()
        counters[self._number * COUNTER_STEP] = count
        if first and self.two_batches is not None:
            self.two_batches.switch()
        for other in self._members:
            if counters[other * COUNTER_STEP] < count:
                self._wait(counters, other * COUNTER_STEP, count)
        self._order()
        return slots

    def _order(self) -> None:
        """Reads and writes before this are done before those after it. Taking a lock has that effect on every
        processor."""
        with self._fence:
            pass

    def _wait(self, counters: memoryview, place: int, count: int) -> None:
        for _ in range(_SPINS):
            if counters[place] >= count:
                return
        for _ in range(_YIELDS):
            os.sched_yield()  # also leaves the interpreter to other threads
            if counters[place] >= count:
                return
        due = time.monotonic() + _CHECK_SECONDS
        while counters[place] < count:
            time.sleep(_NAP_SECONDS)
            if time.monotonic() > due:
                self._check()
                due = time.monotonic() + _CHECK_SECONDS


class SharedMemory(Parts):
    """Ranks as processes of one machine, which have mapped the same file. `two_batches`: a step may have
    halves.

    `given`: without what only some of the ranks exchange, see `sharing` and `group`.
    """

    stage, stages = 0, 1

    def __init__(
        self,
        file: int,
        rank: int,
        size: int,
        check: Callable[[], None],
        expert_groups: ExpertGroups = NO_GROUPS,
        *,
        attention_ranks: int = 0,
        two_batches: bool = False,
    ) -> None:
        super().__init__(rank, range(size), check, TwoBatches() if two_batches else None)
        self.expert_groups, self.attention_ranks = expert_groups, attention_ranks
        kind, group = subgroups(rank, size, expert_groups, attention_ranks)
        self._some = [Parts(rank, members, check) for members in (kind, group)]
        self.sharing: Collectives = self if len(kind) == size else _unless_alone(self._some[0])
        self.group: Collectives = self.sharing if len(group) == len(kind) else _unless_alone(self._some[1])
        self.open(file)

    def open(self, file: int) -> None:
        """Begin anew with another file, which all ranks open."""
        own = shared_file.AREAS * shared_file.parts_bytes(self.size)
        memory = mmap.mmap(file, own + shared_file.sums_bytes(self.size))
        self.open_areas(memory, self.size, 0, 1)
        for area, parts in enumerate(self._some, 2):
            parts.open_areas(memory, self.size, area)
        self.sums = RankSums(torch.frombuffer(memory, dtype=torch.uint8, offset=own), self.size, self._check)


def _unless_alone(parts: Parts) -> Collectives:
    return parts if parts.size > 1 else ONE_RANK


def add_up(parts: list[Tensor], into: Tensor) -> None:
    """The sum of parts in their order, rounded once to their dtype."""
    if len(parts) == 1:
        into.copy_(parts[0])
        return
    if into.dtype in (torch.float32, torch.float64):
        torch.add(parts[0], parts[1], out=into)
        for part in parts[2:]:
            into += part
        return
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    into.copy_(total)
