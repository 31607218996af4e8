"""The process of a rank other than the first, with the descriptors of what it shares with others; "-" for no
memory.

    python -m personae.engine.parallel.process LINE MEMORY [BEFORE AFTER]     on the first rank's machine
    python -m personae.engine.parallel.process far LISTENER IDENTITY MEMORY   on another, see far_stages.py

It loads its part of the model, and then does what the first rank tells it, in that order. It ends when the
first rank does, and after any error, which ends the engine.
"""

import gc
import logging
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from ssl import SSLError
from threading import Thread
from typing import Never, NoReturn

import msgspec
import numpy as np
import torch

import personae
from personae.engine.base_weights import DecoderBaseWeights
from personae.engine.kv import KVCache
from personae.engine.loader import is_out_of_memory, load_model
from personae.engine.lora_shapes import lora_shapes, pool_rows, rank_shapes
from personae.engine.machine_sockets import TlsIdentity
from personae.engine.models.decoder import Decoder
from personae.engine.numerics import weights_digest
from personae.engine.parallel.comm import ONE_RANK, Comm, SharedMemory
from personae.engine.parallel.far_stages import ORDERS, Callers, Channel, connect
from personae.engine.parallel.messages import (
    Answer,
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
    decode_message,
    encode,
)
from personae.engine.parallel.pipeline import Neighbours, Pipeline
from personae.engine.parallel.process_groups import ProcessGroups, open_store
from personae.engine.worker.known import Guess, Ints, KnownTokens
from personae.engine.worker.profiling import GpuMemory, measured, step_bytes
from personae.engine.worker.runner import Runner
from personae.engine.worker.warm_up import warm_up
from personae.engine.worker.worker import AdapterTicket, ExpertMemory, Forward, HiddenStates, PackedStep
from personae.errors import AdapterError, LoadError, ModelLoadError, Overloaded
from personae.kernels.malloc import give_back_freed
from personae.kernels.memory import memory_of
from personae.lora.adapter import Adapter
from personae.lora.copies import StreamCopies, pinned
from personae.lora.library import AdapterLibrary, Prepare
from personae.lora.pool import LoraPool
from personae.lora.shards import of_layers, of_modules, sharded
from personae.lora.source import AdapterSource
from personae.lora.stacking import stacked
from personae.lora.throttle import Rest
from personae.lora.writing import made_ready

_CHECK_SECONDS = 0.05


def preparation(model: Decoder) -> Prepare:
    """The function that makes of an adapter what this rank's pool takes: its part, as the pool has it."""
    comm, config = model.comm, model.config
    first, shards, modules, layers = (
        comm.sharing.rank == 0,
        config.shards,
        config.lora_sites.keys(),
        range(config.first_layer, config.first_layer + config.layers),
    )

    def prepare(adapter: Adapter, *, rest: Rest) -> Adapter:
        part = sharded(adapter, shards, first=first) if shards else adapter
        if 0 < comm.attention_ranks < comm.size:
            part = of_modules(part, modules)
        if comm.stages > 1:
            part = of_layers(part, layers, vocabulary=comm.stage == 0)
        if model.device.type == "cuda":
            return made_ready(part, model.dtype, pinned, rest)
        return stacked(part, config.layers, model.dtype, rest)

    return prepare


Line = Connection | Channel
"""To the first rank."""


class SentTokens(KnownTokens):
    """The tokens of the rows of one step, as the first rank has sent them."""

    def __init__(self, begin: Begin) -> None:
        self._of = {slot: np.frombuffer(tokens, np.int64) for slot, tokens in begin.tokens.items()}
        self.guesses = {row: Guess(*guess) for row, guess in begin.guesses.items()}

    def inputs(self, slots: Ints, starts: Ints, counts: Ints, offsets: Ints, total: int) -> tuple[Ints, Ints]:
        """See KnownTokens."""
        ids, unknown = np.zeros(total, np.int64), []
        for i, slot in enumerate(slots.tolist()):
            there = self._of.get(slot)
            if there is None:
                unknown.append(i)
            else:
                ids[offsets[i] : offsets[i] + len(there)] = there
        return ids, np.array(unknown, np.int64)


class RankServer:
    """A rank's runner, which does what messages say."""

    def __init__(self, model: Decoder, connection: Line) -> None:
        self._model = model
        self._connection = connection
        self._name = _name(model.comm)
        self._packed: PackedStep | None = None
        self._hidden: deque[HiddenStates] = deque()  # of the steps without logits so far
        self._forward: Forward | None = None
        self._tickets: dict[str, AdapterTicket] = {}
        self._work: dict[int, Iterator[None]] = {}

    def run(self) -> Never:
        """Do what arrives. Raises EOFError when the first rank has gone."""
        while True:
            self._receive(decode_message.decode(self._connection.recv_bytes()))

    def _receive(self, message: ToRank) -> None:
        match message:
            case Build():
                self._build(message.sizes)
            case Begin():
                self._packed = self._runner.begin(message.plan, SentTokens(message))
            case RunForward():
                assert self._packed is not None
                self._hidden.append(self._runner.forward(self._packed))
            case Logits():
                self._forward = self._runner.logits(self._hidden.popleft())
            case PromptLogits(slot=slot, first=first, count=count):
                assert self._forward is not None
                self._runner.prompt_logits(self._forward, slot, first, count)
            case Commit(slots=slots, tokens=tokens):
                at = self._model.device
                self._runner.commit(torch.tensor(slots, device=at), torch.tensor(tokens, device=at))
            case PlaceExperts(layer=layer, placement=placement):
                self._experts.place(layer, placement)
            case _:
                self._answer(message)

    @property
    def _experts(self) -> ExpertMemory:
        assert self._runner.experts is not None
        return self._runner.experts

    def _build(self, sizes: PoolSizes) -> None:
        """A runner with empty caches. On a GPU it compiles its kernels, which all ranks do together."""
        with self._failing("allocate its caches"):
            self._runner = _runner(self._model, sizes)
        self._connection.send_bytes(encode(Answer()))
        if self._model.device.type == "cuda":
            warm_up(self._runner)

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """Tell the first rank of any error, with what was being done."""
        try:
            yield
        except ConnectionError:  # another rank has ended, and is the one to name
            raise
        except Exception as error:
            self._connection.send_bytes(encode(_failed(f"{self._name} {_cannot(doing, error)}")))
            raise

    def _answer(self, message: ToRank) -> None:
        """Do what has an answer. An error that the first rank has too is one."""
        if isinstance(message, MeasureDevice):
            with self._failing("run a step to measure its memory"):
                found = _measured(self._model, message.sizes)
            self._connection.send_bytes(encode(Answer(found)))
            return
        try:
            answer = Answer(self._call(message))
        except (AdapterError, ModelLoadError, Overloaded) as error:
            answer = Answer(error=(type(error).__name__, error.message))
        self._connection.send_bytes(encode(answer))

    def _call(self, message: ToRank) -> object:
        runner = self._runner
        match message:
            case LoadAdapter(digest=digest, source=source, files=files):
                with _folders(source, files) as here:
                    self._tickets[digest] = ticket = runner.load_adapter(digest, here)
                return ticket.missing
            case OpenPieces(work=work, place=str() as digest):
                self._work[work] = self._tickets.pop(digest).pieces()
            case OpenPieces(work=work, lend=tuple() as pages):
                self._work[work] = runner.lending(pages)
            case OpenPieces(work=work, returned=tuple() as pages):
                self._work[work] = runner.returning(pages)
            case OpenPieces(work=work, experts=(layer, placement)):
                self._work[work] = self._experts.reading(layer, placement)
            case AskExperts():
                return self._experts.layers()
            case NextPiece(work=work):
                return self._piece(work)
            case Discard(digest=digest):
                runner.discard(digest)
            case Release(digest=digest):
                runner.release(digest)
            case ReturnPages(count=count):
                return runner.recall(count)
            case _:
                raise TypeError(f"{type(message).__name__} has no answer")
        return None

    def _piece(self, work: int) -> bool:
        done = object()
        try:
            if next(self._work[work], done) is not done:
                return True
        except (AdapterError, ModelLoadError, Overloaded):
            del self._work[work]
            raise
        del self._work[work]
        return False


@contextmanager
def _folders(source: AdapterSource, files: tuple[dict[str, bytes], ...] | None) -> Iterator[AdapterSource]:
    """The source of an adapter on this machine: itself, or folders with these files for now."""
    if files is None:
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="personae-adapter-") as above:
        folders = [Path(above) / str(number) for number in range(len(files))]
        for folder, contents in zip(folders, files, strict=True):
            folder.mkdir()
            for name, content in contents.items():
                (folder / Path(name).name).write_bytes(content)
        yield AdapterSource(tuple(map(str, folders)))


def _measured(model: Decoder, sizes: PoolSizes | None) -> GpuMemory:
    """See MeasureDevice."""

    def step() -> int:
        if sizes is None:
            return 0
        return step_bytes(
            model,
            rank_shapes(model),
            sizes.layout,
            getattr(torch, sizes.kv_dtype),
            ranks=sizes.ranks,
            max_adapters=sizes.max_adapters,
            graphs=False,
        )

    return measured(model.device, step)


def _runner(model: Decoder, sizes: PoolSizes) -> Runner:
    device, memory, dtype = model.device, memory_of(model.device, 0), getattr(torch, sizes.kv_dtype)
    pool = LoraPool(
        rank_shapes(model),
        capacity_rows=pool_rows(model, sizes.ranks),
        max_adapters=sizes.max_adapters,
        dtype=model.dtype,
        device=device,
        base=DecoderBaseWeights(model),
        spare_rows=sizes.spare_ranks,
        copies=StreamCopies() if device.type == "cuda" else None,
        memory=memory,
    )
    kv = KVCache(model.config.kv_specs, sizes.layout, dtype, device, memory=memory)
    library = AdapterLibrary(lora_shapes(model), {}, None, 0, preparation(model))
    return Runner(model, kv, sizes.layout, pool, library.take)


def _comm(start: StartRank, memory: str, neighbours: Neighbours | None, check: Callable[[], None]) -> Comm:
    """What this rank exchanges with others. `memory`: the descriptor of what its stage shares, or "-"."""
    comm: Comm = ONE_RANK
    if memory != "-":
        comm = SharedMemory(
            int(memory),
            start.rank,
            start.size,
            check,
            start.expert_groups,
            attention_ranks=start.attention_ranks,
            two_batches=start.two_batches,
        )
    elif start.size > 1:
        comm = ProcessGroups(
            start.rank,
            start.size,
            _neighbour_ended,
            start.expert_groups,
            attention_ranks=start.attention_ranks,
            two_batches=start.two_batches,
        )
    if neighbours is None:
        return comm
    return Pipeline(comm, start.stage, start.stages, neighbours, _neighbour_ended)


def _connected(arguments: list[str], check: Callable[[], None]) -> tuple[Line, StartRank, Comm]:
    """The connection to the first rank, what it says first, and what this rank exchanges with others."""
    line: Line
    if arguments[0] == "far":
        listener, identity, memory = arguments[1:]
        with os.fdopen(int(identity), "rb") as file:
            callers = Callers(
                socket(fileno=int(listener)), msgspec.msgpack.decode(file.read(), type=TlsIdentity)
            )
        line = Channel(callers.take(ORDERS))
        start = msgspec.msgpack.decode(line.recv_bytes(), type=StartRank)
        assert start.links is not None
        return line, start, _comm(start, memory, Neighbours(*connect(start.links, callers)), check)
    number, memory, *beside = arguments
    line = Connection(int(number))
    start = msgspec.msgpack.decode(line.recv_bytes(), type=StartRank)
    neighbours = None
    if beside:
        neighbours = Neighbours(*(socket(fileno=int(each)) for each in beside))
    elif start.links is not None:
        neighbours = Neighbours(*connect(start.links, None))
    return line, start, _comm(start, memory, neighbours, check)


def _neighbour_ended() -> NoReturn:
    raise ConnectionResetError("another rank of the model has ended")


def _join(comm: Comm, start: StartRank, device: torch.device) -> bool:
    """Join the other ranks, if they exchange through a library. Returns whether they do. A library's waits
    would not end with the first rank, so a thread ends this process."""
    parts = comm.inner if isinstance(comm, Pipeline) else comm
    if not isinstance(parts, ProcessGroups):
        return False
    assert start.library is not None
    Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    parts.join_all(start.library, open_store(start.store), start.stage, device)
    return True


def _end_with_parent(parent: int) -> NoReturn:
    while True:
        _check_parent(parent)
        time.sleep(_CHECK_SECONDS)


def _check_parent(parent: int) -> None:
    """End this process if the first rank's has ended."""
    if os.getppid() != parent:
        os._exit(0)


def _begun(connection: Line, start: StartRank, comm: Comm) -> Decoder:
    """This rank's part of the model, once it has joined the others. Tells the first rank of both, or of the
    error that ends this process."""
    device = torch.device(start.device)
    doing = "load its part"
    try:
        model = _loaded(start, device, comm)
        connection.send_bytes(encode(Answer()))
        doing = "join the others"
        if _join(comm, start, device):
            connection.send_bytes(encode(Answer()))
    except ConnectionError:  # another rank has ended, and is the one to name
        raise
    except LoadError as error:
        place = start.stage * start.size + start.rank
        connection.send_bytes(encode(_failed(f"rank {place}: {error.message}")))
        os._exit(0)
    except Exception as error:
        connection.send_bytes(encode(_failed(f"{_name(comm)} {_cannot(doing, error)}")))
        raise
    return model


def _name(comm: Comm) -> str:
    return f"Rank {comm.stage * comm.size + comm.rank} of the model"


def _failed(why: str) -> Answer:
    return Answer(error=(LoadError.__name__, why))


def _loaded(start: StartRank, device: torch.device, comm: Comm) -> Decoder:
    """This rank's part of the model. Raises LoadError."""
    if start.version != personae.__version__:
        raise LoadError(
            f"It has Personae {personae.__version__}, and the first rank has {start.version}. It was "
            "installed anew; start again."
        )
    model = load_model(
        Path(start.model),
        device=device,
        dtype=start.dtype,
        quantize=start.quantize,
        max_position=start.max_position,
        comm=comm,
    )
    if weights_digest(Path(start.model)) != start.weights:
        raise LoadError("It sees other weights than the first rank. They have changed; start again.")
    return model


def _cannot(doing: str, error: BaseException) -> str:
    """What is wrong, after the name of a rank."""
    if is_out_of_memory(error):
        return f"has too little memory to {doing}."
    first, *_ = str(error).splitlines() or [type(error).__name__]
    return f"cannot {doing}: {first}"


def main() -> Never:
    """Run the process."""
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM):  # these are for the server; this ends with the first rank
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    try:
        connection, start, comm = _connected(sys.argv[1:], partial(_check_parent, parent))
        torch.set_grad_enabled(False)
        model = _begun(connection, start, comm)
        give_back_freed()
        gc.freeze()
        RankServer(model, connection).run()
    except (EOFError, BrokenPipeError, ConnectionResetError, SSLError):
        os._exit(0)  # the first rank has gone
    except BaseException:
        logging.getLogger("personae.engine").exception("a rank of the model crashed")
        os._exit(1)


if __name__ == "__main__":
    main()
