"""NIXL as the way of pages from one engine to another: the fetcher reads them from the holder's memory.

Pages pass through windows, memory that is registered once. A transfer that takes too long cannot be taken
back: it may write into its window at any time later. So that window stays out of use until the transfer has
ended, and no page of the KV cache is ever written by one.

What travels is neither encrypted nor asked for a certificate: it is for a private network. UCX's environment
(`UCX_TLS`, `UCX_NET_DEVICES`) says which one.

Source: https://github.com/ai-dynamo/nixl/blob/main/docs/python_api.md, version 1.5.1.
"""

import secrets
import threading
import time
from collections import OrderedDict
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

WINDOW_BYTES = 4 * 2**20
WINDOWS = 8
MOST_PEERS = 64
PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
_POLL_SECONDS = 0.0002


class Window(NamedTuple):
    """Registered memory, and its address."""

    memory: NDArray[np.uint8]
    address: int


class NixlAgent:
    """This engine's side of transfers. Any thread may use it. Raises ImportError without NIXL, and what NIXL
    raises if it cannot begin."""

    def __init__(self, windows: int = WINDOWS) -> None:
        api: Any = import_module(f"{next(filter(find_spec, PACKAGES), PACKAGES[0])}._api")
        self._agent = api.nixl_agent(secrets.token_hex(8), api.nixl_agent_config(backends=["UCX"]))
        self._memory = np.zeros((windows, WINDOW_BYTES), np.uint8)
        self._agent.register_memory([(self._memory.ctypes.data, self._memory.nbytes, 0, "")], "DRAM")
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._lock = threading.Lock()
        self._free = [Window(window, window.ctypes.data) for window in self._memory]
        self._late: list[tuple[Any, Window]] = []  # transfers that took too long, and where they may write
        self._peers: OrderedDict[bytes, str] = OrderedDict()  # names by metadata

    def take_window(self) -> Window | None:
        """A window for the caller alone; None if there is none now."""
        with self._lock:
            for each in list(self._late):
                if self._state(each[0]) != "PROC":
                    self._late.remove(each)
                    self._free.append(each[1])
            return self._free.pop() if self._free else None

    def give_back(self, window: Window) -> None:
        """Others may use it. It stays out of use while a transfer may write to it."""
        with self._lock:
            if all(window is not late for _, late in self._late):
                self._free.append(window)

    def read(self, metadata: bytes, address: int, count: int, window: Window, deadline: float) -> None:
        """Read `count` bytes at `address` of another engine into a window. Raises OSError if that engine is
        gone, and TimeoutError after the deadline."""
        try:
            with self._lock:
                handle = self._agent.initialize_xfer(
                    "READ",
                    self._agent.get_xfer_descs([(window.address, count, 0)], "DRAM"),
                    self._agent.get_xfer_descs([(address, count, 0)], "DRAM"),
                    self._peer(metadata),
                )
                state = self._agent.transfer(handle)
        except Exception as error:  # NIXL has errors of its own
            raise ConnectionError(f"NIXL: {error or type(error).__name__}") from None
        while state == "PROC":
            time.sleep(_POLL_SECONDS)
            with self._lock:
                state = self._state(handle)
                if state == "PROC" and time.monotonic() > deadline:
                    self._late.append((handle, window))
                    raise TimeoutError("it took too long")
        if state != "DONE":
            raise ConnectionError(f"NIXL: the transfer failed: {state}")

    def _state(self, handle: Any) -> str:
        """Where a transfer stands: PROC, DONE, or why it failed. NIXL raises where it should return ERR."""
        try:
            return str(self._agent.check_xfer_state(handle))
        except Exception as error:  # as above
            return str(error) or type(error).__name__

    def _peer(self, metadata: bytes) -> str:
        """The name of another engine's agent."""
        if metadata not in self._peers:
            name = self._agent.add_remote_agent(metadata)
            self._peers[metadata] = name.decode() if isinstance(name, bytes) else name
        self._peers.move_to_end(metadata)
        if len(self._peers) > MOST_PEERS:
            self._agent.remove_remote_agent(self._peers.popitem(last=False)[1])
        return self._peers[metadata]
