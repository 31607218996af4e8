"""Several ranks as one worker: all get the same calls, and the first rank's results are returned.

Ranks keep the same state because they begin the same steps and place the same adapters in the same order.
What they exchange while they compute is between their layers. Each rank but the first has a thread here. A
single rank needs no group: it is the worker.

The ranks of one stage have room for the same adapters. Those of different stages may not, because their
layers differ. An adapter is placed on all ranks or on none, and memory goes back to the cache on all ranks
or on none.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import torch

from personae.engine.plan import ExpertBalance, MemoryLayout, StepPlan
from personae.engine.worker.expert_balancing import ExpertBalancing
from personae.engine.worker.known import KnownTokens
from personae.engine.worker.worker import (
    AdapterMemory,
    AdapterTicket,
    ExpertMemory,
    Forward,
    HiddenStates,
    PackedStep,
    Worker,
)
from personae.errors import AdapterError, ModelLoadError, Overloaded
from personae.lora.source import AdapterSource
from personae.lora.stored import Pieces

T = TypeVar("T")


def as_one(ranks: Sequence[Worker]) -> Worker:
    """One worker of these ranks."""
    return ranks[0] if len(ranks) == 1 else WorkerGroup(ranks)


class WorkerGroup:
    """At least two ranks as one Worker. If a step fails on another rank, the next step raises the error
    here."""

    def __init__(self, ranks: Sequence[Worker]) -> None:
        self._first = ranks[0]
        self._others = [_Rank(rank, f"rank {number}") for number, rank in enumerate(ranks[1:], 1)]
        self.device: torch.device = self._first.device
        self.layout: MemoryLayout = self._first.layout
        self.vocab_size: int = self._first.vocab_size
        self.experts = None
        self._balancing = None if self._first.experts is None else ExpertBalancing(_Experts(self))

    @property
    def expert_balance(self) -> ExpertBalance | None:
        """See Worker."""
        return None if self._balancing is None else self._balancing.balance

    def begin(self, plan: StepPlan, known: KnownTokens) -> PackedStep | None:
        """See Worker. All ranks have packed when this returns, so `known` may change then."""
        if self._balancing is not None and plan.rows:
            self._balancing.before_step()
        packing = [rank.begin(plan, known) for rank in self._others]
        packed = self._first.begin(plan, known)
        for rank, each in zip(self._others, packing, strict=True):
            each.result()
            rank.check()
        return packed

    def forward(self, packed: PackedStep, overlap: Callable[[], None] | None = None) -> HiddenStates:
        """See Worker."""
        for rank in self._others:
            rank.forward()
        return self._first.forward(packed, overlap)

    def logits(self, hidden: HiddenStates, logit_mask: torch.Tensor | None = None) -> Forward:
        """See Worker. The other ranks compute all logits of theirs."""
        for rank in self._others:
            rank.logits()
        return self._first.logits(hidden, logit_mask)

    def prompt_logits(self, forward: Forward, slot: int, first: int, count: int) -> torch.Tensor:
        """See Worker."""
        for rank in self._others:
            rank.prompt_logits(slot, first, count)
        return self._first.prompt_logits(forward, slot, first, count)

    def hidden_states(self, forward: Forward, first: int, count: int) -> torch.Tensor:
        """See Worker. Every rank has all hidden states."""
        return self._first.hidden_states(forward, first, count)

    def commit(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """See Worker."""
        for rank in self._others:
            rank.commit(slots, tokens)
        self._first.commit(slots, tokens)

    @property
    def adapter_stats(self) -> tuple[int, int, int]:
        """See AdapterMemory."""
        return self._first.adapter_stats

    def load_adapter(self, digest: str, source: AdapterSource) -> "GroupTicket":
        """See AdapterMemory. Each rank reads its part."""
        return GroupTicket(self, self._all(lambda worker: worker.load_adapter(digest, source)))

    def discard(self, digest: str) -> None:
        """See AdapterMemory."""
        self._all(lambda worker: worker.discard(digest))

    def release(self, digest: str) -> None:
        """See AdapterMemory."""
        self._all(lambda worker: worker.release(digest))

    def lending(self, pages: tuple[int, ...]) -> Iterator[None]:
        """See AdapterMemory."""
        yield from self._together(self._all(lambda worker: worker.lending(pages)))

    def recall(self, count: int) -> tuple[int, ...]:
        """See AdapterMemory. A rank that returns more than another borrows the difference again."""
        found = self._all(lambda worker: worker.recall(count))
        fewest = min(found, key=len)
        again = [pages[: len(pages) - len(fewest)] for pages in found]
        if any(again):
            self._each([partial(_lend, pages=pages) for pages in again])
        return fewest

    def returning(self, pages: tuple[int, ...]) -> Iterator[None]:
        """See AdapterMemory."""
        yield from self._together(self._all(lambda worker: worker.returning(pages)))

    def placing(self, tickets: Sequence[AdapterTicket]) -> Pieces:
        """See AdapterTicket.pieces. If a rank cannot place the adapter, the others discard it."""
        ends = yield from self._together([ticket.pieces() for ticket in tickets])
        errors = [end for end in ends if isinstance(end, AdapterError | Overloaded)]
        if errors:
            digest = tickets[0].digest
            self._each([_nothing if end in errors else partial(_discard, digest=digest) for end in ends])
            raise next((error for error in errors if isinstance(error, AdapterError)), errors[0])
        return _all_of([end for end in ends if end is not None])

    def _all(self, work: Callable[[Worker], T]) -> list[T]:
        """The result of each rank, the first rank's first."""
        return self._each([work] * (1 + len(self._others)))

    def _each(self, works: Sequence[Callable[[Worker], T]]) -> list[T]:
        """The result of each rank's own work, the first rank's first."""
        own, *rest = works
        others = [rank.call(work, rank.worker) for rank, work in zip(self._others, rest, strict=True)]
        return [own(self._first), *(each.result() for each in others)]

    def _together(self, pieces: Sequence[Iterator[None]]) -> Generator[None, None, list[Any]]:
        """Run the pieces of all ranks, one of each at a time. Returns what each ended with: the iterator's
        value, or its AdapterError, Overloaded or ModelLoadError."""
        own, *rest = pieces
        ends: list[Any] = [_UNFINISHED] * len(pieces)
        while _UNFINISHED in ends:
            others = [
                rank.call(_run_piece, one) if end is _UNFINISHED else None
                for rank, one, end in zip(self._others, rest, ends[1:], strict=True)
            ]
            if ends[0] is _UNFINISHED:
                ends[0] = _run_piece(own)
            for number, each in enumerate(others, 1):
                if each is not None:
                    ends[number] = each.result()
            yield
        return ends


class _Experts:
    """The ExpertRanks of a group."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.together = group._together

    def all(self, work: Callable[[ExpertMemory], Any]) -> list[Any]:
        """See ExpertRanks."""

        def of_rank(worker: Worker) -> Any:
            assert worker.experts is not None
            return work(worker.experts)

        return self._group._all(of_rank)


@dataclass(frozen=True, slots=True)
class GroupTicket:
    """An AdapterTicket for all ranks of a group."""

    group: WorkerGroup
    ranks: Sequence[AdapterTicket]

    @property
    def digest(self) -> str:
        """The adapter's digest."""
        return self.ranks[0].digest

    @property
    def missing(self) -> int:
        """See AdapterTicket."""
        return max(ticket.missing for ticket in self.ranks)

    def pieces(self) -> Pieces:
        """See AdapterTicket."""
        return self.group.placing(self.ranks)


class _Rank:
    """A worker with a thread that makes its calls in order."""

    def __init__(self, worker: Worker, name: str) -> None:
        self.worker = worker
        self._thread = ThreadPoolExecutor(1, name)
        self._pending: list[Future[None]] = []
        self._packed: PackedStep | None = None
        self._hidden: deque[HiddenStates] = deque()  # of the steps without logits so far
        self._forward: Forward | None = None

    def call(self, work: Callable[..., T], *args: object) -> Future[T]:
        """Call something on the rank's thread."""
        return self._thread.submit(work, *args)

    def check(self) -> None:
        """Raise the first error of the earlier calls."""
        pending, self._pending = self._pending, []
        for each in pending:
            each.result()

    def begin(self, plan: StepPlan, known: KnownTokens) -> Future[None]:
        """Pack a step."""

        def begin() -> None:
            self._packed = self.worker.begin(plan, known)

        return self.call(begin)

    def forward(self) -> None:
        """Compute the packed step."""

        def forward() -> None:
            assert self._packed is not None
            self._hidden.append(self.worker.forward(self._packed))

        self._pending.append(self.call(forward))

    def logits(self) -> None:
        """Compute the logits of the oldest step without."""

        def logits() -> None:
            self._forward = self.worker.logits(self._hidden.popleft())

        self._pending.append(self.call(logits))

    def prompt_logits(self, slot: int, first: int, count: int) -> None:
        """Take part in computing the logits."""

        def logits() -> None:
            assert self._forward is not None
            self.worker.prompt_logits(self._forward, slot, first, count)

        self._pending.append(self.call(logits))

    def commit(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """See Worker. The tensors are on the first rank's device."""

        def commit() -> None:
            device = self.worker.device
            self.worker.commit(slots.to(device), tokens.to(device))

        self._pending.append(self.call(commit))


_UNFINISHED = object()


def _run_piece(pieces: Iterator[None]) -> Any:
    """Run the next piece. Returns _UNFINISHED, or if the iterator has ended its return value or its error."""
    try:
        next(pieces)
    except StopIteration as end:
        return end.value
    except (AdapterError, ModelLoadError, Overloaded) as error:
        return error
    return _UNFINISHED


def _lend(worker: AdapterMemory, *, pages: tuple[int, ...]) -> None:
    for _ in worker.lending(pages) if pages else ():
        pass


def _discard(worker: AdapterMemory, *, digest: str) -> None:
    worker.discard(digest)


def _nothing(_worker: AdapterMemory) -> None:
    """This rank has nothing to do."""


def _all_of(futures: Sequence[Future[None]]) -> Future[None] | None:
    """A future that is done when all are, and fails if one of them has failed. None for no futures."""
    if len(futures) < 2:
        return futures[0] if futures else None
    done: Future[None] = Future()
    left, lock = set(futures), Lock()

    def one(future: Future[None]) -> None:
        with lock:
            left.remove(future)
            if left:
                return
        failed = [error for each in futures if (error := each.exception()) is not None]
        if failed:
            done.set_exception(failed[0])
        else:
            done.set_result(None)

    for each in futures:
        each.add_done_callback(one)
    return done
