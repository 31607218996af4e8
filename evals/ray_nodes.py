"""A Ray cluster of several nodes on this machine's loopback addresses, whose nodes can be killed or stopped:
Ray's own processes there, and the engines."""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

_HEAD = "127.0.0.2"


class RayNodes:
    """The head has no engines. Each of `count` nodes has so many CPUs. The constructor blocks for seconds.

    Ray's processes end with the thread that starts them, so one long-lived thread starts them all.
    """

    def __init__(self, count: int, cpus: int = 1) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._thread = ThreadPoolExecutor(1)
        self._cluster = self._thread.submit(_head).result()
        self.address: str = self._cluster.address
        self.host = _HEAD
        self._cpus = cpus
        self._free = [f"127.0.0.{number}" for number in range(3, 250)]
        self._nodes: list[Any] = []
        self._stopped: list[int] = []
        for _ in range(count):
            self.add()

    def add(self) -> None:
        """Add a node, with an address that was not used before."""
        adding = self._thread.submit(
            self._cluster.add_node,
            num_cpus=self._cpus,
            node_ip_address=self._free.pop(0),
            object_store_memory=80 * 2**20,
        )
        self._nodes.append(adding.result())

    def processes(self) -> dict[str, list[int]]:
        """The ids of the processes of each node, by its address."""
        found = {}
        for node in self._nodes:
            raylet = node.all_processes["raylet"][0].process.pid
            found[node.node_ip_address] = [raylet, *descendants(raylet)]
        return found

    def strike(self, address: str, how: signal.Signals) -> None:
        """Send a signal to all processes of a node. It does not come back; `add` another."""
        pids = self.processes()[address]
        self._nodes = [node for node in self._nodes if node.node_ip_address != address]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, how)
        if how == signal.SIGSTOP:
            self._stopped += pids

    def strike_any(self, rng: random.Random, how: signal.Signals) -> str:
        """Do so to any node. Returns its address."""
        address: str = rng.choice(self._nodes).node_ip_address
        self.strike(address, how)
        return address

    def bury(self) -> None:
        """Kill the stopped processes."""
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._stopped.clear()

    def close(self) -> None:
        """End everything."""
        self.bury()
        self._thread.submit(self._cluster.shutdown).result()
        self._thread.shutdown()


def _head() -> Any:
    from ray.cluster_utils import Cluster

    return Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "node_ip_address": _HEAD, "include_dashboard": False},
        shutdown_at_exit=False,
    )


def descendants(pid: int) -> list[int]:
    """The ids of all direct and indirect child processes of a process."""
    parent: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parent[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, new = [], [pid]
    while new:
        new = [child for child, its in parent.items() if its in new]
        found += new
    return found
