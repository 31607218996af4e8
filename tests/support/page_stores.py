"""LMCache's server and a Mooncake store, the real ones, on free ports of loopback."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from patience import eventually


class PageStore:
    """A store that runs: its URL for --kv-remote, and its processes, which may be killed and begun anew."""

    def __init__(self, url: str, commands: Sequence[tuple[Sequence[str], int]], log: Path) -> None:
        self.url = url
        self._commands, self._log = commands, log  # each with the port on which it listens
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start it, and wait until it listens."""
        environment = os.environ | {"LMCACHE_TRACK_USAGE": "false", "OMP_NUM_THREADS": "1"}
        for command, port in self._commands:
            with self._log.open("ab") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            self._processes.append(process)
            eventually(partial(_listens, port), f"it listens, see {self._log}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        for process in self._processes:
            process.send_signal(number)

    def kill(self) -> None:
        """End it as a crash does."""
        self.send(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes.clear()


@contextmanager
def page_store(kind: str, folder: Path) -> Iterator[PageStore]:
    """A store of this kind, `lmcache` or `mooncake`, with its files in a folder. Skips the test, and says
    why, if it is not installed."""
    store = (_lmcache if kind == "lmcache" else _mooncake)(folder)
    try:
        store.start()
        yield store
    finally:
        store.kill()
        Path(f"/dev/shm/lmcache_l1_pool_{_segment()}").unlink(missing_ok=True)


def _lmcache(folder: Path) -> PageStore:
    program = shutil.which("lmcache")
    if program is None or find_spec("zmq") is None:
        pytest.skip("lmcache is not on the PATH (install it in an environment of its own), or no pyzmq")
    port = _free_port()
    command = f"{program} server --host 127.0.0.1 --port {port} --http-port {_free_port()}"
    command += " --l1-size-gb 0.1 --eviction-policy LRU --supported-transfer-mode engine_driven"
    command += f" --shm-name {_segment()} --no-l1-use-lazy --disable-observability --disable-metrics"
    behind = f'{{"type": "fs_native", "base_path": "{folder}/chunks"}}'
    return PageStore(
        f"lmcache://127.0.0.1:{port}", [([*command.split(), "--l2-adapter", behind], port)], folder / "log"
    )


def _mooncake(folder: Path) -> PageStore:
    spec = find_spec("mooncake")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("mooncake is not installed: pip install mooncake-transfer-engine-non-cuda")
    try:
        import mooncake.store  # noqa: F401 - it needs libraries of the system
    except ImportError as error:
        pytest.skip(f"mooncake cannot be loaded: {error}")
    programs = Path(spec.submodule_search_locations[0])
    master, metrics, holder = _free_port(), _free_port(), _free_port()
    serve = f"{programs}/mooncake_master --rpc_port={master} --rpc_address=127.0.0.1 --metrics_port={metrics}"
    hold = f"{programs}/mooncake_client --host=127.0.0.1 --port={holder} --global_segment_size=64MB"
    hold += f" --metadata_server=P2PHANDSHAKE --master_server_address=127.0.0.1:{master}"
    return PageStore(
        f"mooncake://127.0.0.1:{master}?metrics_port={metrics}",
        [(serve.split(), metrics), (hold.split(), holder)],
        folder / "log",
    )


def _segment() -> str:
    return f"personae-{os.getpid()}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as trying:
        return trying.connect_ex(("127.0.0.1", port)) == 0
