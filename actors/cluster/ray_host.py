"""The Ray actor on an engine's node. It starts the engine's process when the frontend asks for it, or the
ranks of one of its stages.

Ray chooses its node, and starts it on another one when its node dies. It imports no torch: the engine is a
process of its own.
"""

import os
import signal
import socket
from contextlib import suppress
from threading import Lock, Thread

import msgspec
import ray

from personae.actors.cluster.agent import run_engine
from personae.actors.cluster.contact import Contact, Dial, StageOrder
from personae.actors.cluster.node import refusal
from personae.actors.cluster.stage_processes import StageProcesses
from personae.actors.spawn import COMMAND
from personae.engine.machine_sockets import ENGINE, new_identity
from personae.engine.parallel.far_stages import Address
from personae.errors import LoadError

END_SECONDS = 10.0  # how long to wait for a killed process


class EngineHost:
    """Runs one engine's process at a time, started by `command`."""

    command: tuple[str, ...] = COMMAND

    def __init__(self) -> None:
        self._identity = new_identity(ENGINE)
        self._lock = Lock()
        self._thread: Thread | None = None
        self._pid: int | None = None
        self._error: str | None = None
        self._stage: StageProcesses | None = None

    def describe(self) -> tuple[str, str, str]:
        """Return the node's id, its name for people, and the certificate that its engines show."""
        context = ray.get_runtime_context()
        name = f"{ray.util.get_node_ip_address()} ({socket.gethostname()})"
        return context.get_node_id(), name, self._identity.certificate

    def begin(self, contact: bytes, version: str, model: str, weights: str) -> str | None:
        """End the previous engine, and start one that connects to this contact. Returns why that is
        impossible, if it is."""
        with self._lock:
            if (why := refusal(version, model, weights)) is not None:
                return why
            self._end()
            if self._thread is not None and self._thread.is_alive():
                return f"the previous engine, process {self._pid}, does not end."
            call = Dial(msgspec.msgpack.decode(contact, type=Contact), self._identity)
            self._error = None
            self._thread = Thread(target=self._run, args=(call,), daemon=True)
            self._thread.start()
            return None

    def begin_stage(self, order: bytes, version: str, model: str, weights: str) -> str | list[Address]:
        """End the previous ranks, and start those of a stage. Returns where they listen, or why they cannot
        be started."""
        with self._lock:
            if (why := refusal(version, model, weights)) is not None:
                return why
            if self._stage is not None:
                self._stage.end()
            try:
                self._stage = StageProcesses(
                    ray.util.get_node_ip_address(), msgspec.msgpack.decode(order, type=StageOrder)
                )
            except OSError as error:
                return f"the ranks of a stage can't be started: {error.strerror or error}."
            return self._stage.addresses

    def _run(self, call: Dial) -> None:
        try:
            run_engine(call, self.command, spawned=self._spawned)
        except LoadError as error:
            self._error = error.message

    def _spawned(self, pid: int) -> None:
        self._pid = pid

    def _end(self) -> None:
        if self._thread is None:
            return
        if self._thread.is_alive() and self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._thread.join(END_SECONDS)
