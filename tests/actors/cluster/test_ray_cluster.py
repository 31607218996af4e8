"""The frontend's side of a Ray cluster, with a stand-in for the process that talks to Ray."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import anyio
import pytest
from patience import PATIENCE

from personae.actors.cluster import ray_cluster
from personae.actors.cluster.ray_cluster import open_ray

pytestmark = pytest.mark.anyio

DRIVER = """
import socket, sys
from personae.actors.cluster.ray_messages import Gather, Gathered, Placed, Request
from personae.actors.framing import frame, receive_first
from personae.actors.line import Line

line = Line(socket.socket(fileno=int(sys.argv[-1])))
try:
    while True:
        request = receive_first(line, Request)
        if isinstance(request, Gather):
            line.sendall(frame(Gathered(request.number, "127.0.0.1", ())))
        else:
            line.sendall(frame(Placed(request.number, "a node", f"certificate {request.engine}")))
except EOFError:
    pass
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    monkeypatch.setattr(ray_cluster, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3] / ".pkg"))


@pytest.mark.usefixtures("driver")
async def test_engines_that_start_at_the_same_time_all_find_a_place() -> None:
    admitted: list[str] = []
    with anyio.fail_after(PATIENCE):
        async with open_ray("auto", None, 3, 1.0, 0.0, Path("model"), "") as ray:
            ray.admit = admitted.append
            async with anyio.create_task_group() as tasks:
                for engine in range(3):
                    tasks.start_soon(ray.place, engine)
    assert sorted(admitted) == ["certificate 0", "certificate 1", "certificate 2"]
