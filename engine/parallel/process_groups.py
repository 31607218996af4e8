"""What the ranks of one model exchange through `torch.distributed`: NCCL on GPUs, gloo on CPUs.

These libraries add up in an order that depends on how many numbers there are (NCCL), or that differs between
ranks (gloo, from three ranks on). So they only carry parts here, and each rank adds them up in the order of
the ranks. All ranks get the same bits, those of `SharedMemory`, and a row's bits do not depend on the other
rows. A small sum goes to all ranks whole, in one exchange. For a large one each rank adds up its slice and
gives that to the others, which are as many bytes as a ring has.

The groups belong to one model and not to the process. So a process can have several models, and each epoch
has groups of its own.

NCCL's exchanges are kernels that wait for those of the other ranks. They end if all ranks run them in one
order. Halves of a step that take turns keep that order: one thread launches at a time, both on one stream,
and every rank changes from one half to the other at the same exchanges. A group's exchanges run one after the
other, as they were begun. Those of two groups could run at the same time, and on each rank in another order.
So on the GPU each begins after the last one of another group.
"""

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, cast

import torch
from torch import Tensor

from personae.engine.parallel.comm import ONE_RANK, Collectives, add_up, subgroups
from personae.engine.parallel.expert_placement import NO_GROUPS, ExpertGroups
from personae.engine.parallel.two_batches import TwoBatches
from personae.kernels.decoder import RankSums

if TYPE_CHECKING:  # some builds of torch have no torch.distributed
    from torch._C._distributed_c10d import Store, TCPStore  # which torch.distributed has undeclared
    from torch.distributed import Work

Library = Literal["gloo", "nccl"]
"""What carries the parts."""

TIMEOUT = timedelta(minutes=30)  # of an exchange, and for all ranks to load; an end is noticed at once
WHOLE_BYTES = 2**18  # a larger sum of three ranks or more goes in slices
_HOST = "127.0.0.1"
_log = logging.getLogger("personae.engine")


def new_store() -> tuple["TCPStore", int]:
    """Where the ranks of a model find each other, and its port on the loopback interface. It ends with this
    process."""
    from torch._C._distributed_c10d import TCPStore

    with socket.create_server((_HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return TCPStore(
            _HOST,
            port,
            is_master=True,
            timeout=TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        ), port


def open_store(port: int) -> "TCPStore":
    """The store that the first rank has opened at this port."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(_HOST, port, is_master=False, timeout=TIMEOUT)


class _Group(Protocol):
    """What torch's backends have, and their declarations lack."""

    def _allgather_base(self, output: Tensor, input: Tensor, /) -> "Work": ...

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], /
    ) -> "Work": ...


def _new_group(library: Library, store: "Store", rank: int, size: int) -> _Group:
    """A group of so many ranks, which find each other in the store."""
    group: Any
    if library == "gloo":
        from torch.distributed import ProcessGroupGloo

        options = cast("Any", ProcessGroupGloo)._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=_HOST)]
        options._timeout = TIMEOUT
        group = ProcessGroupGloo(store, rank, size, options)
    else:
        from torch.distributed import ProcessGroupNCCL  # a torch for CPUs has none

        settings = ProcessGroupNCCL.Options()
        settings._timeout = TIMEOUT
        group = ProcessGroupNCCL(store, rank, size, settings)
    group._set_sequence_number_for_group()
    return cast("_Group", group)


class GroupOrder:
    """Has the exchanges of a rank's groups run one group at a time."""

    def __init__(self) -> None:
        self._last: tuple[object, Work] | None = None

    def begin(self, group: object, begin: "Callable[[], Work]") -> "Work":
        """Begin an exchange of this group: on a GPU after the last one of another group."""
        if self._last is not None and self._last[0] is not group:
            self._last[1].wait()
        self._last = group, begin()
        return self._last[1]

    def begin_anew(self) -> None:
        """Forget the exchanges of earlier groups."""
        self._last = None


class GroupParts:
    """Some ranks that exchange parts of tensors through a process group. One thread of each calls it at a
    time. `members`: their numbers, of which this rank has `number`. `ended` is called if another rank has
    closed its connection; it raises an error. `two_batches`: see `Parts`. `order`: of this rank's
    groups, if it has several."""

    def __init__(
        self,
        number: int,
        members: range,
        ended: Callable[[], NoReturn],
        two_batches: TwoBatches | None = None,
        order: GroupOrder | None = None,
    ) -> None:
        self.rank, self.size, self.members = members.index(number), len(members), members
        self.two_batches, self._order = two_batches, order
        self._ended = ended

    def join(self, library: Library, store: "Store", device: torch.device) -> None:
        """Begin anew with a new group, which all members join. What is exchanged later lies on the device, or
        is copied there and back."""
        self._group, self._device = _new_group(library, store, self.rank, self.size), device
        x = torch.zeros(self.size, 1, device=device)  # so that the library takes its memory now
        self.all_gather(x, [1] * self.size)
        self.reduce_scatter(x, [1] * self.size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Collectives."""
        whole = x.contiguous()
        rows = whole.view(-1, 1).to(self._device)
        if self.size == 2 or whole.nbytes <= WHOLE_BYTES:
            add_up(self._gathered(rows), rows)
        else:
            bounds = [rank * len(rows) // self.size for rank in range(self.size + 1)]
            counts = [stop - start for start, stop in pairwise(bounds)]
            own = self.reduce_scatter(rows, counts)
            rows.copy_(self._gathered_rows(own, counts, first=False))
        return whole.copy_(rows.view_as(whole)) if rows.device != whole.device else whole

    def all_gather(self, x: Tensor, widths: list[int]) -> Tensor:
        """See Collectives."""
        widest, here = max(widths), x.to(self._device)
        if widest > x.shape[1]:
            here = torch.nn.functional.pad(here, (0, widest - x.shape[1]))
        parts = self._gathered(here)
        found = torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)
        return found.to(x.device)

    def gather_rows(self, x: Tensor, counts: list[int], takers: range | None = None) -> Tensor:
        """See Comm. Those that take no rows get them, too, and drop them."""
        found = self._gathered_rows(x, counts, first=True)
        return found if takers is None or self.rank in takers else found[:0]

    def reduce_scatter(self, x: Tensor, counts: list[int], givers: range | None = None) -> Tensor:
        """See Comm."""
        givers = range(self.size) if givers is None else givers
        rows, row_bytes = counts[self.rank], x.shape[1] * x.element_size()
        found = x.new_empty(rows, x.shape[1])
        if not sum(counts):
            return found
        parts = x.new_empty(len(givers), rows, x.shape[1])
        gives = self.rank in givers
        given = x.contiguous() if gives else x[:0]
        self._exchange(
            lambda: self._group.alltoall_base(
                _bytes_of(parts),
                _bytes_of(given),
                [rows * row_bytes if rank in givers else 0 for rank in range(self.size)],
                [count * row_bytes if gives else 0 for count in counts],
            )
        )
        add_up(list(parts.unbind()), found)
        return found

    def _gathered_rows(self, x: Tensor, counts: list[int], *, first: bool) -> Tensor:
        """[rows, width] of each rank -> [sum of rows, width]."""
        most = max(counts)
        here = torch.nn.functional.pad(x, (0, 0, 0, most - len(x))) if most > len(x) else x
        parts = self._gathered(here, first=first)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def _gathered(self, x: Tensor, *, first: bool = True) -> list[Tensor]:
        """What each rank has, of one shape. `first`: exchange of a call."""
        parts = x.new_empty(self.size, *x.shape)
        if x.numel():
            here = x.contiguous()
            self._exchange(
                lambda: self._group._allgather_base(_bytes_of(parts), _bytes_of(here)), first=first
            )
        return list(parts.unbind())

    def _exchange(self, begin: "Callable[[], Work]", *, first: bool = True) -> None:
        """Begin an exchange, and wait for it: on a GPU its later work does. `first`: of a call."""
        with self._noticing():
            work = begin() if self._order is None else self._order.begin(self, begin)
        if first and self.two_batches is not None:
            self.two_batches.switch()
        with self._noticing():
            work.wait()

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the libraries have no other for a connection that is closed
            _log.warning("an exchange between ranks failed: %s", str(error).partition("\n")[0])
            self._ended()


class ProcessGroups(GroupParts):
    """Ranks as processes of one machine that exchange through `torch.distributed`: the Comm of one of them,
    once it has joined the others. `two_batches`: a step may have halves."""

    stage, stages = 0, 1
    sums: RankSums | None = None

    def __init__(
        self,
        rank: int,
        size: int,
        ended: Callable[[], NoReturn],
        expert_groups: ExpertGroups = NO_GROUPS,
        *,
        attention_ranks: int = 0,
        two_batches: bool = False,
    ) -> None:
        super().__init__(rank, range(size), ended, TwoBatches() if two_batches else None)
        self.expert_groups, self.attention_ranks = expert_groups, attention_ranks
        kind, group = subgroups(rank, size, expert_groups, attention_ranks)
        self._some: list[GroupParts] = []
        self.sharing: Collectives = self if len(kind) == size else self._parts(rank, kind)
        self.group: Collectives = self.sharing if len(group) == len(kind) else self._parts(rank, group)

    def _parts(self, rank: int, members: range) -> Collectives:
        if len(members) == 1:
            return ONE_RANK
        self._order = self._order or GroupOrder()
        self._some.append(GroupParts(rank, members, self._ended, order=self._order))
        return self._some[-1]

    def join_all(self, library: Library, store: "Store", stage: int, device: torch.device) -> None:
        """Begin anew with new groups, which the ranks of this stage join. Waits for them."""
        from torch._C._distributed_c10d import PrefixStore

        if self._order is not None:
            self._order.begin_anew()
        for parts in (self, *self._some):
            place = PrefixStore(f"{stage} {parts.members}", store)
            with self._noticing():
                parts.join(library, place, device)


def _bytes_of(x: Tensor) -> Tensor:
    """A contiguous tensor's bytes, as which every dtype is carried."""
    return x.view(-1).view(torch.uint8)
