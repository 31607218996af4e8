"""The processes of the ranks other than the first, as the first rank has them.

To everybody else the group is one worker (`engine/worker/group.py`). The first rank plans, binds and samples.
It tells the others plans, tokens and where adapters are. If one of them ends, the first rank's next step
fails, so the engine ends and is started again with all of them.
"""

import logging
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, cast

import msgspec
import torch

import personae
from personae.engine.numerics import weights_digest
from personae.engine.parallel.comm import ONE_RANK, Comm, SharedMemory
from personae.engine.parallel.expert_placement import NO_GROUPS, ExpertGroups, LayerExperts, Placement
from personae.engine.parallel.far_stages import ORDERS, Channel, FarStages, call, connect
from personae.engine.parallel.messages import (
    AskExperts,
    Begin,
    Build,
    Commit,
    Discard,
    LoadAdapter,
    Logits,
    MeasureDevice,
    NextPiece,
    OpenPieces,
    PlaceExperts,
    PoolSizes,
    PromptLogits,
    Release,
    ReturnPages,
    RunForward,
    StartRank,
    ToRank,
    decode_answer,
    encode,
)
from personae.engine.parallel.pipeline import Neighbours, Pipeline, ring
from personae.engine.parallel.process_groups import Library, ProcessGroups, new_store
from personae.engine.parallel.shared_file import new_shared_file
from personae.engine.parallel.thread_state import thread_state
from personae.engine.params import SamplingParams
from personae.engine.plan import Admission, StepPlan
from personae.engine.sequence import SequenceLog
from personae.engine.worker.known import KnownTokens
from personae.engine.worker.profiling import GpuMemory
from personae.engine.worker.worker import Forward, HiddenStates, PackedStep
from personae.errors import AdapterError, LoadError, ModelLoadError, Overloaded
from personae.kernels.devices import visible_devices
from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE
from personae.lora.source import AdapterSource
from personae.lora.stored import Pieces

if TYPE_CHECKING:  # some builds of torch have no torch.distributed
    from torch._C._distributed_c10d import Store  # which torch.distributed has undeclared

Line = Connection | Channel
"""To a rank's process, on this machine or on another."""

CPU = torch.device("cpu")
T = TypeVar("T")
_CHECK_SECONDS = 0.05
_LAST_WORDS_SECONDS = 1.0  # for a rank that ends to say why
_log = logging.getLogger("personae.engine")
_ERRORS = {"AdapterError": AdapterError, "Overloaded": Overloaded, "ModelLoadError": ModelLoadError}


class RankEnded(RuntimeError):
    """A rank's process has ended, so the model is not complete any more."""


class Ranks:
    """All ranks of one model but the first. `comm` is the first rank's part in what they exchange, `count`
    how many ranks there are with the first. `attention_ranks`: see Comm. `two_batches`: see SharedMemory.
    `library`: what carries what they exchange, None for shared memory. On GPUs rank 0 has
    the first GPU that this process sees, rank 1 the second, and so on.

    `size` ranks share the layers of each of the `stages`. The ranks' numbers go stage by stage. They load
    their parts in parallel to the first rank, which calls `loaded` when it has its own. `far`: all stages but
    the first are on other machines, where their processes run already. Raises LoadError if one of these
    cannot be reached.
    """

    def __init__(
        self,
        model: Path,
        size: int,
        stages: int = 1,
        expert_groups: ExpertGroups = NO_GROUPS,
        *,
        attention_ranks: int = 0,
        two_batches: bool = False,
        dtype: str,
        quantize: str | None,
        max_position: int | None,
        threads: int,
        far: FarStages | None = None,
        device: torch.device = CPU,
        library: Library | None = None,
    ) -> None:
        weights = weights_digest(model)
        places = [(rank, stage) for stage in range(stages) for rank in range(size)]
        self._starts = [
            StartRank(
                rank,
                size,
                stage,
                stages,
                expert_groups,
                attention_ranks,
                two_batches,
                device.type,
                personae.__version__,
                str(model),
                weights,
                dtype,
                quantize,
                max_position,
                None if far is None else far.links(rank, stage),
                library,
            )
            for rank, stage in places[1:]
        ]
        self._far = far
        self.count = len(places)
        self._size, self._stages = size, stages
        self._threads, self._device, self._library = threads, device, library
        self._devices = visible_devices() if device.type == "cuda" else []
        self._store: Store | None = None
        self._over = Event()  # set when the processes are ended here
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[Line] = []
        self._used = False
        self._finalizer: weakref.finalize[..., Ranks] | None = None
        shared = self._shared()
        own = shared[0]
        self._sums: SharedMemory | ProcessGroups | None = None
        if own.file is not None:
            self._sums = SharedMemory(
                own.file,
                0,
                size,
                self.check,
                expert_groups,
                attention_ranks=attention_ranks,
                two_batches=two_batches,
            )
        elif size > 1:
            self._sums = ProcessGroups(
                0,
                size,
                self._ended,
                expert_groups,
                attention_ranks=attention_ranks,
                two_batches=two_batches,
            )
        self.comm: Comm = self._sums or ONE_RANK
        self._pipeline: Pipeline | None = None
        self._start(shared)
        neighbours = own.neighbours if far is None else self._connect(far)
        if neighbours is not None:
            self._pipeline = Pipeline(self.comm, 0, stages, neighbours, self._ended)
            self.comm = self._pipeline

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [process.pid for process in self._processes]

    def loaded(self) -> None:
        """Wait until all have loaded and found each other. Raises LoadError, with its number, if one cannot,
        or ends meanwhile."""
        self._alongside("loaded its part", _nothing)
        if isinstance(self._sums, ProcessGroups):
            assert self._library is not None
            assert self._store is not None
            join = partial(self._sums.join_all, self._library, self._store, 0, self._device)
            self._alongside("joined the others", join)

    def measured(self, sizes: PoolSizes | None, own: Callable[[], GpuMemory]) -> list[GpuMemory]:
        """What all ranks measure at the same time; `own`: what the first one does. See MeasureDevice. Raises
        LoadError, with its number, if another rank cannot."""
        self._tell(MeasureDevice(sizes))
        first, others = self._alongside("measured its memory", own)
        return [first, *(msgspec.convert(each, GpuMemory) for each in others)]

    def build(self, sizes: PoolSizes) -> "list[RemoteRank]":
        """Have all allocate their caches. The first call takes the processes that run; each later one begins
        a new epoch, with new processes. Raises RankEnded if some are on other machines, where the engine
        cannot start them, and LoadError if a rank cannot."""
        if self._used:
            if self._far is not None:
                raise RankEnded("ranks on other machines are started with the engine only")
            self.end()
            shared = self._shared()
            own = shared[0]
            if isinstance(self._sums, SharedMemory) and own.file is not None:
                self._sums.open(own.file)
            if self._pipeline is not None and own.neighbours is not None:
                self._pipeline.close()
                self._pipeline.open(own.neighbours)
            self._start(shared)
            self.loaded()
        self._used = True
        self._tell(Build(sizes))
        self._alongside("allocated its caches", _nothing)
        if self._library == "nccl":
            Thread(target=end_with, args=(self._processes, self._over), daemon=True).start()
        return [
            RemoteRank(line, self.check, sizes, sends_files=isinstance(line, Channel)) for line in self._lines
        ]

    def _tell(self, message: ToRank) -> None:
        for line in self._lines:
            with suppress(OSError):  # it has ended, which `_alongside` finds
                line.send_bytes(encode(message))

    def _alongside(self, done: str, own: Callable[[], T]) -> tuple[T, list[Any]]:
        """What `own` returns here, and the answers of all other ranks, which do the same at the same time.
        `done`: what each has done then.

        Raises LoadError, with its number, as soon as one cannot, or ends. `own` may then wait for that rank
        for long, so it has a thread, which is left behind.
        """
        here: Future[T] = Future()
        Thread(target=_run, args=(own, here, thread_state()), daemon=True).start()
        waiting = dict(zip(self._lines, range(1, self.count), strict=True))
        answers: list[Any] = [None] * self.count
        try:
            while waiting or not here.done():
                for line in _arrived(waiting):
                    answers[waiting[line]] = self._answer(line, waiting, done)
                    del waiting[line]
                if here.done() and isinstance(here.exception(), RankEnded):
                    raise self._end_of_one(waiting, done)
                if here.done():
                    here.result()
        except BaseException:
            self.end()
            raise
        return here.result(), answers[1:]

    def _answer(self, line: Line, waiting: "dict[Line, int]", done: str) -> Any:
        """A rank's answer. Raises LoadError."""
        try:
            answer = decode_answer.decode(line.recv_bytes())
        except (EOFError, OSError):
            raise self._end_of_one(waiting, done) from None
        if answer.error is not None:
            raise LoadError(answer.error[1])
        return answer.value

    def _end_of_one(self, waiting: "dict[Line, int]", done: str) -> LoadError:
        """Why a rank has ended: what it has said, or how its process did. Those that end because another one
        has say nothing, and their exit code is 0."""
        until, ended = time.monotonic() + _LAST_WORDS_SECONDS, dict[int, int]()
        while time.monotonic() < until and not any(ended.values()):
            for line in _arrived(waiting):
                with suppress(EOFError, OSError):
                    if (error := decode_answer.decode(line.recv_bytes()).error) is not None:
                        return LoadError(error[1])
            codes = ((rank, process.poll()) for rank, process in enumerate(self._processes, 1))
            ended = {rank: code for rank, code in codes if code is not None}
            time.sleep(_CHECK_SECONDS)
        if not ended and self._far is not None and waiting:
            return LoadError(f"Rank {min(waiting.values())} of the model ended before it had {done}.")
        if not ended:
            return LoadError(f"The ranks of the model lost each other before all had {done}; see the log.")
        rank = max(ended, key=lambda each: ended[each] != 0)
        return LoadError(f"Rank {rank} of the model ended with exit code {ended[rank]} before it had {done}.")

    def check(self) -> None:
        """Raises RankEnded if a process has ended."""
        for rank, process in enumerate(self._processes, 1):
            if (code := process.poll()) is not None:
                raise RankEnded(f"rank {rank} of the model ended with exit code {code}")

    def _ended(self) -> NoReturn:
        self.check()
        raise RankEnded("a rank of the model has closed its connection")

    def end(self) -> None:
        """End the processes."""
        if self._finalizer is not None:
            self._finalizer()

    def _shared(self) -> "list[_Shared]":
        """What each rank shares with others, the first rank included."""
        here = self._stages if self._far is None else 1
        shares = self._size > 1 and self._library is None
        files = [new_shared_file(self._size) if shares else None for _ in range(here)]
        if self._far is not None:
            return [_Shared(files[0], None)] * self._size
        total = self._size * self._stages
        links: list[Neighbours | None] = [None] * total
        if self._stages > 1:
            links = list(ring(self._size, self._stages))
        return [_Shared(files[rank // self._size], links[rank]) for rank in range(total)]

    def _start(self, shared: "list[_Shared]") -> None:
        """Start the processes, and call those on other machines. What they share is closed here, but for the
        first rank's connections."""
        self._processes, self._lines, self._over = [], [], Event()
        self._finalizer = weakref.finalize(self, _end, self._processes, self._lines, self._over)
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        port = 0
        if self._library is not None:
            self._store, port = new_store()
        for number, (start, own) in enumerate(zip(self._starts, shared[1:], strict=self._far is None), 1):
            gpu = {"CUDA_VISIBLE_DEVICES": self._devices[number]} if self._devices else {}
            ours, theirs = Pipe()
            given = [theirs.fileno(), own.file, *(each.fileno() for each in own.neighbours or ())]
            command = [
                sys.executable,
                "-m",
                f"{__package__}.process",
                *("-" if fd is None else str(fd) for fd in given),
            ]
            with theirs:
                self._processes.append(
                    subprocess.Popen(  # noqa: S603  # our own interpreter and module
                        command,
                        stdin=subprocess.DEVNULL,
                        env=environment | gpu,
                        pass_fds=[fd for fd in given if fd is not None],
                    )
                )
            ours.send_bytes(encode(msgspec.structs.replace(start, store=port)))
            self._lines.append(ours)
            for connection in own.neighbours or ():
                connection.close()
        for file in {own.file for own in shared}:
            if file is not None:
                os.close(file)
        if self._far is not None:
            for start in self._starts[self._size - 1 :]:
                self._lines.append(self._order(start, self._far))

    def _order(self, start: StartRank, far: FarStages) -> Channel:
        """Tell a rank on another machine what to load."""
        address = far.addresses[start.stage - 1][start.rank]
        try:
            line = Channel(call(address, ORDERS, far.identity))
            line.send_bytes(encode(start))
        except OSError as error:
            number = start.stage * start.size + start.rank
            raise LoadError(
                f"Rank {number} of the model can't be reached at {address[0]}:{address[1]}: {error}"
            ) from None
        return line

    def _connect(self, far: FarStages) -> Neighbours:
        """The first rank's connections to stages on other machines."""
        try:
            return Neighbours(*connect(far.links(0, 0), None))
        except OSError as error:
            raise LoadError(f"A stage of the model on another machine can't be reached: {error}") from None


class _Shared(NamedTuple):
    """What a rank shares with others: the file of its stage's sums, and its connections to other stages; None
    if there is nobody to share it with."""

    file: int | None
    neighbours: Neighbours | None


def _nothing() -> None:
    pass


def _run(
    own: Callable[[], T], here: "Future[T]", as_caller: Callable[[], AbstractContextManager[None]]
) -> None:
    try:
        with as_caller():
            here.set_result(own())
    except BaseException as error:  # raised where the result is taken
        here.set_exception(error)


def _arrived(lines: "dict[Line, int]") -> list[Line]:
    """Those that have something to read, after a short wait."""
    if not lines:
        time.sleep(_CHECK_SECONDS)
        return []
    return cast("list[Line]", wait(cast("Any", list(lines)), _CHECK_SECONDS))


def end_with(processes: list[subprocess.Popen[bytes]], over: Event) -> None:
    """End this process when one of these, which are ranks 1, 2 and so on, ends before it is `over`. On a GPU
    nothing else can: its work waits for the other rank for ever, and what runs behind that must not be read
    as tokens."""
    while not over.wait(_CHECK_SECONDS):
        for rank, process in enumerate(processes, 1):
            if (code := process.poll()) is not None:
                _log.error("rank %d of the model ended with exit code %d, and the engine with it", rank, code)
                os._exit(1)


def _end(processes: list[subprocess.Popen[bytes]], lines: list[Line], over: Event) -> None:
    over.set()
    for line in lines:
        line.close()
    for process in processes:
        process.kill()
        process.wait()


class RemoteRank:
    """A rank's process as a Worker. What it computes stays there: it answers only what concerns its memory.

    One thread calls it. Raises RankEnded if the process has ended. `sends_files`: it is on another machine,
    so adapters go there.
    """

    def __init__(
        self, line: Line, check: Callable[[], None], sizes: PoolSizes, *, sends_files: bool = False
    ) -> None:
        self._line, self._check, self._sends_files = line, check, sends_files
        self._numbers = count()
        self.device = torch.device("cpu")
        self.layout = sizes.layout
        self.vocab_size = 0
        self.adapter_stats = (0, 0, 0)
        self.experts = RemoteExperts(self)
        self.expert_balance = None

    def tell(self, message: ToRank) -> None:
        """Send a message that has no answer."""
        try:
            self._line.send_bytes(encode(message))
        except OSError:
            self._ended()

    def ask(self, message: ToRank) -> Any:
        """Send a message and wait for the answer. Raises the rank's AdapterError, Overloaded or
        ModelLoadError."""
        self.tell(message)
        try:
            answer = decode_answer.decode(self._line.recv_bytes())
        except (EOFError, OSError):
            self._ended()
        if answer.error is not None:
            kind, text = answer.error
            raise _ERRORS[kind](text)
        return answer.value

    def _ended(self) -> Any:
        self._check()
        raise RankEnded("a rank of the model has closed its connection")

    def begin(self, plan: StepPlan, known: KnownTokens) -> Any:
        """See Worker."""
        tokens = {
            row.slot: given for row in plan.rows if (given := known.given(row.slot, row.start, row.count))
        }
        guesses = (
            {row: (guess.tokens, guess.drafts) for row, guess in known.guesses.items()} if plan.rows else {}
        )
        admissions = tuple(map(_without_tokens, plan.admissions))
        self.tell(Begin(msgspec.structs.replace(plan, admissions=admissions), tokens, guesses))
        return bool(plan.rows) or None

    def forward(self, packed: PackedStep, overlap: Callable[[], None] | None = None) -> Any:
        """See Worker."""
        self.tell(RunForward())
        return True

    def logits(self, hidden: HiddenStates, logit_mask: torch.Tensor | None = None) -> Any:
        """See Worker."""
        self.tell(Logits())
        return True

    def prompt_logits(self, forward: Forward, slot: int, first: int, count: int) -> torch.Tensor:
        """See Worker."""
        self.tell(PromptLogits(slot, first, count))
        return torch.empty(0)

    def hidden_states(self, forward: Forward, first: int, count: int) -> torch.Tensor:
        """See Worker. The first rank has them all, so nobody asks here."""
        raise NotImplementedError

    def commit(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """See Worker."""
        self.tell(Commit(slots.tolist(), tokens.tolist()))

    def load_adapter(self, digest: str, source: AdapterSource) -> "RemoteTicket":
        """See AdapterMemory."""
        files = tuple(map(_contents, source.folders)) if self._sends_files else None
        return RemoteTicket(self, digest, self.ask(LoadAdapter(digest, source, files)))

    def discard(self, digest: str) -> None:
        """See AdapterMemory."""
        self.ask(Discard(digest))

    def release(self, digest: str) -> None:
        """See AdapterMemory."""
        self.ask(Release(digest))

    def lending(self, pages: tuple[int, ...]) -> Iterator[None]:
        """See AdapterMemory."""
        yield from self.pieces(OpenPieces(next(self._numbers), lend=pages))

    def recall(self, count: int) -> tuple[int, ...]:
        """See AdapterMemory."""
        return tuple(self.ask(ReturnPages(count)))

    def returning(self, pages: tuple[int, ...]) -> Iterator[None]:
        """See AdapterMemory."""
        yield from self.pieces(OpenPieces(next(self._numbers), returned=pages))

    def place(self, digest: str) -> Pieces:
        """See AdapterTicket.pieces."""
        yield from self.pieces(OpenPieces(next(self._numbers), place=digest))
        return None

    def reading(self, layer: int, placement: Placement) -> Iterator[None]:
        """See ExpertMemory."""
        yield from self.pieces(OpenPieces(next(self._numbers), experts=(layer, placement)))

    def pieces(self, work: OpenPieces) -> Iterator[None]:
        """Do memory work, piece by piece."""
        self.ask(work)
        while self.ask(NextPiece(work.work)):
            yield


class RemoteTicket:
    """An AdapterTicket of a rank."""

    def __init__(self, rank: RemoteRank, digest: str, missing: int) -> None:
        self._rank, self.digest, self.missing = rank, digest, missing

    def pieces(self) -> Pieces:
        """See AdapterTicket."""
        return self._rank.place(self.digest)


class RemoteExperts:
    """The ExpertMemory of a rank."""

    def __init__(self, rank: RemoteRank) -> None:
        self._rank = rank

    def layers(self) -> dict[int, LayerExperts]:
        """See ExpertMemory."""
        return msgspec.convert(self._rank.ask(AskExperts()), dict[int, LayerExperts])

    def reading(self, layer: int, placement: Placement) -> Iterator[None]:
        """See ExpertMemory."""
        yield from self._rank.reading(layer, placement)

    def place(self, layer: int, placement: Placement) -> None:
        """See ExpertMemory."""
        self._rank.tell(PlaceExperts(layer, placement))


def _contents(folder: str) -> dict[str, bytes]:
    """An adapter's files by name. Raises AdapterError."""
    try:
        return {name: (Path(folder) / name).read_bytes() for name in (CONFIG_FILE, TENSORS_FILE)}
    except OSError as error:
        raise AdapterError(f"The adapter's files can't be read: {error}") from None


def _without_tokens(admission: Admission) -> Admission:
    """What a rank needs to know of a sequence: its adapter. The tokens come with the rows."""
    log = admission.log
    own = SequenceLog(
        log.id,
        (),
        0,
        SamplingParams(seed=0, max_tokens=1),
        adapter=log.adapter,
        adapter_start=log.adapter_start,
    )
    return Admission(admission.slot, own)
