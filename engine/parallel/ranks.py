"""The processes of the ranks other than the first, as the first rank has them.

To everybody else the group is one worker (`engine/worker/group.py`). The first rank plans, binds and samples.
It tells the others plans, tokens and where adapters are. If one of them ends, the first rank's next step
fails, so the engine ends and is started again with all of them.
"""

import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from personae.engine.parallel.comm import SharedMemory, shared_file
from personae.engine.parallel.messages import (
    Begin,
    Build,
    Commit,
    Discard,
    LoadAdapter,
    NextPiece,
    OpenPieces,
    PoolSizes,
    PromptLogits,
    RankLoaded,
    Release,
    Repay,
    RunForward,
    StartRank,
    ToRank,
    decode_answer,
    encode,
)
from personae.engine.params import SamplingParams
from personae.engine.plan import Admission, StepPlan
from personae.engine.sequence import SequenceLog
from personae.engine.worker.known import KnownTokens
from personae.engine.worker.worker import Forward, LogitMask, PackedStep, all_logits
from personae.errors import AdapterError, LoadError, Overloaded
from personae.lora.source import AdapterSource
from personae.lora.stored import Pieces

_ERRORS = {"AdapterError": AdapterError, "Overloaded": Overloaded}


class RankEnded(RuntimeError):
    """A rank's process has ended, so the model is not complete any more."""


class Ranks:
    """All ranks of one model but the first. `comm` is the first rank's part in what they exchange.

    They load their parts in parallel to the first rank, which calls `loaded` when it has its own.
    """

    def __init__(
        self,
        model: Path,
        size: int,
        *,
        dtype: str,
        quantize: str | None,
        max_position: int | None,
        threads: int,
    ) -> None:
        self._starts = [
            StartRank(rank, size, str(model), dtype, quantize, max_position) for rank in range(1, size)
        ]
        self._threads = threads
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[Connection[Any, Any]] = []
        self._used = False
        self._finalizer: weakref.finalize[..., Ranks] | None = None
        file = shared_file(size)
        self.comm = SharedMemory(file, 0, size, self.check)
        self._start(file)

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [process.pid for process in self._processes]

    def loaded(self) -> None:
        """Wait until all have loaded. Raises LoadError if one cannot."""
        for start, line in zip(self._starts, self._lines, strict=True):
            try:
                answer = msgspec.msgpack.decode(line.recv_bytes(), type=RankLoaded)
            except (EOFError, OSError):
                raise LoadError(f"Rank {start.rank} of the model ended while it loaded its part.") from None
            if answer.error is not None:
                raise LoadError(answer.error)

    def build(self, sizes: PoolSizes) -> "list[RemoteRank]":
        """Have all allocate their caches. The first call takes the processes that run; each later one begins
        a new epoch, with new processes."""
        if self._used:
            self.end()
            file = shared_file(self.comm.size)
            self.comm.open(file)
            self._start(file)
            self.loaded()
        self._used = True
        ranks = [RemoteRank(line, self.check, sizes) for line in self._lines]
        for rank in ranks:
            rank.tell(Build(sizes))
        return ranks

    def check(self) -> None:
        """Raises RankEnded if a process has ended."""
        for start, process in zip(self._starts, self._processes, strict=True):
            if (code := process.poll()) is not None:
                raise RankEnded(f"rank {start.rank} of the model ended with exit code {code}")

    def end(self) -> None:
        """End the processes."""
        if self._finalizer is not None:
            self._finalizer()

    def _start(self, file: int) -> None:
        self._processes, self._lines = [], []
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        for start in self._starts:
            ours, theirs = Pipe()
            command = [sys.executable, "-m", f"{__package__}.process", str(theirs.fileno()), str(file)]
            with theirs:
                self._processes.append(
                    subprocess.Popen(  # noqa: S603  # our own interpreter and module
                        command,
                        stdin=subprocess.DEVNULL,
                        env=environment,
                        pass_fds=(theirs.fileno(), file),
                    )
                )
            ours.send_bytes(encode(start))
            self._lines.append(ours)
        os.close(file)
        self._finalizer = weakref.finalize(self, _end, self._processes, self._lines)


def _end(processes: list[subprocess.Popen[bytes]], lines: "list[Connection[Any, Any]]") -> None:
    for line in lines:
        line.close()
    for process in processes:
        process.kill()
        process.wait()


class RemoteRank:
    """A rank's process as a Worker. What it computes stays there: it answers only what concerns its memory.

    One thread calls it. Raises RankEnded if the process has ended.
    """

    def __init__(self, line: "Connection[Any, Any]", check: Callable[[], None], sizes: PoolSizes) -> None:
        self._line, self._check = line, check
        self._numbers = count()
        self.device = torch.device("cpu")
        self.layout = sizes.layout
        self.vocab_size = 0
        self.adapter_stats = (0, 0, 0)

    def tell(self, message: ToRank) -> None:
        """Send a message that has no answer."""
        try:
            self._line.send_bytes(encode(message))
        except OSError:
            self._ended()

    def ask(self, message: ToRank) -> Any:
        """Send a message and wait for the answer. Raises the rank's AdapterError or Overloaded."""
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

    def forward(
        self,
        packed: PackedStep,
        overlap: Callable[[], None] | None = None,
        logit_mask: LogitMask = all_logits,
    ) -> Any:
        """See Worker."""
        self.tell(RunForward())
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
        return RemoteTicket(self, digest, self.ask(LoadAdapter(digest, source)))

    def discard(self, digest: str) -> None:
        """See AdapterMemory."""
        self.ask(Discard(digest))

    def release(self, digest: str) -> None:
        """See AdapterMemory."""
        self.ask(Release(digest))

    def lending(self, pages: tuple[int, ...]) -> Iterator[None]:
        """See AdapterMemory."""
        yield from self.pieces(OpenPieces(next(self._numbers), lend=pages))

    def repay(self, count: int) -> tuple[int, ...]:
        """See AdapterMemory."""
        return tuple(self.ask(Repay(count)))

    def giving_back(self, pages: tuple[int, ...]) -> Iterator[None]:
        """See AdapterMemory."""
        yield from self.pieces(OpenPieces(next(self._numbers), give_back=pages))

    def place(self, digest: str) -> Pieces:
        """See AdapterTicket.pieces."""
        yield from self.pieces(OpenPieces(next(self._numbers), place=digest))
        return None

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
