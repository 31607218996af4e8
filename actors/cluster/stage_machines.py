"""Machines that have a stage of a model each, without Ray: how they find each other.

The engine core is on the first machine and listens at `--dist-init-addr`, while it starts. The other machines
run `serve_stage`. Each calls there, learns which ranks to start, and says where these listen. Then the
engine core calls them (`engine/parallel/far_stages.py`). When they have ended the machine calls once more, so
an engine core that is started again finds it.

All machines have the same identity, a file: only who has it gets an answer. The ranks have another one, which
is new at each start.
"""

import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Never

import msgspec

import personae
from personae.actors.cluster.contact import StageOrder
from personae.actors.cluster.stage_processes import StageProcesses
from personae.actors.framing import frame, receive_first
from personae.actors.options import ModelOptions, host_and_port
from personae.engine.machine_sockets import (
    TlsIdentity,
    client_context,
    new_identity,
    server_context,
    trust,
    tune,
)
from personae.engine.parallel.far_stages import CERTIFIED, Address, FarStages
from personae.errors import LineBroken, LoadError
from personae.kernels.cgroup import usable_cores

NODES = "nodes.personae"  # the name in the machines' certificate
GATHER_SECONDS = 600.0  # for all machines to call
HELLO_SECONDS = 10.0  # for a caller to show that it has the identity, and for an answer
_PAUSE_SECONDS = 0.5  # between two calls, and two reports of who is missing
_FRAME_BYTES = 2**20

log = logging.getLogger("personae.cluster")


class Joins(msgspec.Struct, frozen=True):
    """A machine calls the first one: its `--node-rank`, its `--nnodes`, and its version of Personae."""

    node: int
    nodes: int
    version: str


class JoinRefused(msgspec.Struct, frozen=True, tag=True):
    """The first machine does not take it."""

    why: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """The ranks of a stage, which listen at these addresses."""

    addresses: tuple[Address, ...]


class Ordered(msgspec.Struct, frozen=True, tag=True):
    """What the machine is to start."""

    order: StageOrder


def check_machines(options: ModelOptions) -> None:
    """Raises LoadError for options of several machines that contradict each other."""
    nodes = options.nnodes
    if nodes == 1:
        for name in ("node_rank", "dist_init_addr", "dist_identity"):
            if getattr(options, name):
                raise LoadError(f"--{name.replace('_', '-')} needs --nnodes.")
        return
    if options.node_rank >= nodes:
        raise LoadError(f"--node-rank {options.node_rank}: it must be less than --nnodes, which is {nodes}.")
    if options.pipeline_parallel_size != nodes:
        raise LoadError(
            f"--nnodes {nodes} needs --pipeline-parallel-size {nodes}: each machine has one stage."
        )
    for name in ("dist_init_addr", "dist_identity"):
        if getattr(options, name) is None:
            raise LoadError(f"--nnodes {nodes} needs --{name.replace('_', '-')}.")


def gather(options: ModelOptions, waits: Callable[[int, int], None]) -> FarStages:
    """Wait for the other machines, and have each start the ranks of its stage. `waits` is called now and then
    with how many are there, and all. Raises LoadError if the address is not free, or one does not call."""
    address, path = _machines(options)
    identity, ranks = _own_identity(path), new_identity(CERTIFIED)
    order = Ordered(StageOrder(options.tensor_parallel_size, 0, ranks))
    try:
        listener = socket.create_server(address, family=_family(address))
    except OSError as error:
        raise LoadError(
            f"--dist-init-addr {options.dist_init_addr} can't be opened: {error.strerror or error}."
        ) from None
    tls = server_context(identity)
    tls.num_tickets = 0  # nobody resumes a session
    trust(tls, identity.certificate)
    found: dict[int, tuple[Address, ...]] = {}
    until = time.monotonic() + GATHER_SECONDS
    with listener:
        listener.settimeout(_PAUSE_SECONDS)
        while missing := [node for node in range(1, options.nnodes) if node not in found]:
            waits(len(found) + 1, options.nnodes)
            if time.monotonic() > until:
                raise LoadError(
                    f"--nnodes {options.nnodes}: the machine with --node-rank {missing[0]} has not called "
                    f"{options.dist_init_addr} within {GATHER_SECONDS:g} s."
                )
            with suppress(TimeoutError):
                caller, _ = listener.accept()
                if (joined := _joined(caller, tls, options, order)) is not None:
                    found.update([joined])
    return FarStages(tuple(found[node] for node in sorted(found)), ranks)


def serve_stage(options: ModelOptions) -> Never:
    """Have a stage of the model on this machine, for one engine core after the other. Raises LoadError if the
    first machine refuses."""
    address, path = _machines(options)
    try:
        identity = _read_identity(path)
    except FileNotFoundError:
        raise LoadError(
            f"--dist-identity {path}: there is no such file. The first machine makes it; copy it from there."
        ) from None
    log.info("waiting for the first machine at %s", options.dist_init_addr)
    while True:
        stage = None
        try:
            stage = _answer_call(address, identity, options, path)
            if stage is not None:
                log.info("%d ranks of a stage run here", len(stage.pids))
                stage.wait()
                log.info("the ranks have ended; waiting for the first machine")
        finally:
            if stage is not None:
                stage.end()
        time.sleep(_PAUSE_SECONDS)


def _joined(
    caller: socket.socket, tls: ssl.SSLContext, options: ModelOptions, order: Ordered
) -> tuple[int, tuple[Address, ...]] | None:
    """Take a call: the machine's number, and where its ranks listen. None if it was no machine of the model,
    or one that cannot take part."""
    peer = caller.getpeername()[0]
    try:
        caller.settimeout(HELLO_SECONDS)
        tune(caller)
        with tls.wrap_socket(caller, server_side=True) as line:
            joins = receive_first(line, Joins, _FRAME_BYTES)
            if (why := _refusal(joins, options)) is not None:
                log.warning("%s, node %d: %s", peer, joins.node, why)
                line.sendall(frame(JoinRefused(why)))
                return None
            line.sendall(frame(order))
            return joins.node, receive_first(line, Started, _FRAME_BYTES).addresses
    except (OSError, EOFError, LineBroken, msgspec.MsgspecError) as error:
        log.warning("%s called for a stage, and is not taken: %s", peer, error)
        return None


def _refusal(joins: Joins, options: ModelOptions) -> str | None:
    """Why a machine cannot take part."""
    if joins.version != personae.__version__:
        return f"It has Personae {joins.version}, the first machine has {personae.__version__}."
    if joins.nodes != options.nnodes:
        return f"It has --nnodes {joins.nodes}, the first machine has {options.nnodes}."
    if not 0 < joins.node < options.nnodes:
        return f"--node-rank {joins.node}: the machines have 0 to {options.nnodes - 1}."
    return None


def _answer_call(
    address: Address, identity: TlsIdentity, options: ModelOptions, path: Path
) -> StageProcesses | None:
    """Call the first machine, and start the ranks that it orders. None if it does not answer. Raises
    LoadError if it refuses."""
    try:
        connection = socket.create_connection(address, HELLO_SECONDS)
    except OSError:
        return None
    stage = None
    try:
        tune(connection)
        with client_context(identity, identity.certificate).wrap_socket(
            connection, server_hostname=NODES
        ) as line:
            line.sendall(frame(Joins(options.node_rank, options.nnodes, personae.__version__)))
            answer: JoinRefused | Ordered = receive_first(line, JoinRefused | Ordered, _FRAME_BYTES)
            if isinstance(answer, JoinRefused):
                raise LoadError(f"The first machine at {options.dist_init_addr} refuses: {answer.why}")
            order = msgspec.structs.replace(answer.order, threads=_threads(answer.order.ranks))
            stage = StageProcesses(line.getsockname()[0], order)
            line.sendall(frame(Started(tuple(stage.addresses))))
    except ssl.SSLCertVerificationError:
        raise LoadError(
            f"What listens at {options.dist_init_addr} has another identity than --dist-identity {path}."
        ) from None
    except (OSError, EOFError):  # it has ended meanwhile
        if stage is not None:
            stage.end()
        return None
    return stage


def _threads(ranks: int) -> int:
    """How many threads each rank has here."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else max(int(usable_cores()) // ranks, 1)


def _machines(options: ModelOptions) -> tuple[Address, Path]:
    """Where the first machine listens, and the file with the identity. Raises LoadError for options that
    contradict each other."""
    check_machines(options)
    assert options.dist_init_addr is not None
    assert options.dist_identity is not None
    return host_and_port(options.dist_init_addr), options.dist_identity


def _own_identity(path: Path) -> TlsIdentity:
    """The machines' identity, which is made if there is none."""
    with suppress(FileNotFoundError):
        return _read_identity(path)
    identity = new_identity(NODES)
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(identity.key + identity.certificate)
    except OSError as error:
        raise LoadError(f"--dist-identity {path}: {error.strerror or error}.") from None
    log.warning("made %s; copy it to the other machines, and keep it secret", path)
    return identity


def _read_identity(path: Path) -> TlsIdentity:
    """Raises FileNotFoundError, or LoadError if it is none."""
    begin = "-----BEGIN CERTIFICATE-----"
    try:
        key, found, rest = path.read_text(encoding="ascii").partition(begin)
        identity = TlsIdentity(found + rest, key)
        client_context(identity, identity.certificate)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, LoadError) as error:
        raise LoadError(f"--dist-identity {path} has no key with a certificate: {error}") from None
    return identity


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET
