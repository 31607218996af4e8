"""`personae serve` as it runs: two processes, killed, drained and lost."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from real_server import eventually
from tiny_adapters import make_adapter_folder
from tiny_models import model_folder

ROOT = Path(__file__).resolve().parents[2]


class Served:
    """A server process; `errors` is what it wrote to stderr once it has ended."""

    def __init__(self, *arguments: str) -> None:
        program = "from personae.api.cli import main; main()"
        command = [sys.executable, "-c", program, "serve", "--port", "0", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / ".pkg"), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.first = self.process.stdout.readline()
        found = re.match(r"personae ready (\S+) model=(\S+)", self.first)
        self.url, self.model = (found[1], found[2]) if found else ("", "")

    def back(self) -> int:
        found = subprocess.check_output(["pgrep", "-P", str(self.process.pid)], text=True).split()
        return int(found[0])

    def body(self, **changes: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": "Once", "seed": 4, "ignore_eos": True, "max_tokens": 600}
        return {**body, "stream": True, **changes}

    def end(self, code: int) -> str:
        """Wait for its end; what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == code, errors
        return errors


class Stream(threading.Thread):
    """A streamed completion, read in a thread of its own."""

    def __init__(self, server: Served, **changes: Any) -> None:
        super().__init__()
        self.server, self.changes = server, changes
        self.events: list[str] = []
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        with (
            suppress(httpx.RemoteProtocolError),  # cut off: `text` and the tests see it
            httpx.Client(timeout=60) as client,
            client.stream(
                "POST", f"{self.server.url}/v1/completions", json=self.server.body(**self.changes)
            ) as r,
        ):
            for line in r.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line[6:])
                    self.begun.set()

    def text(self) -> str:
        self.join(60)
        assert self.events[-1] == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in self.events[:-1])


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    model = model_folder("qwen3")
    server = Served(str(model), "--device", "cpu", "--kv-memory", "8MiB", *arguments)
    try:
        assert server.url, server.process.communicate()[1]
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def test_a_killed_back_is_a_pause_and_sigterm_lets_answers_finish_and_refuses_others() -> None:
    with serving() as server:
        calm = Stream(server).text()
        late = httpx.post(
            f"{server.url}/v1/completions",
            json=server.body(stream=False, max_tokens=1000, timeout=0.02),
            timeout=60,
        )
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        eventually(lambda: idle(server), "what was too late holds nothing")
        disturbed = Stream(server)
        disturbed.begun.wait(60)
        os.kill(server.back(), signal.SIGKILL)
        assert disturbed.text() == calm
        metrics = httpx.get(f"{server.url}/metrics").text
        assert re.search(r"personae:back_restarts_total\{.*\} 1\.0", metrics)

        back = server.back()
        last = Stream(server)
        last.begun.wait(60)
        server.process.send_signal(signal.SIGUSR1)
        server.process.send_signal(signal.SIGTERM)
        refused = httpx.Response(200)
        while refused.status_code == 200:
            refused = httpx.get(f"{server.url}/ready")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        refused = httpx.post(f"{server.url}/v1/completions", json=server.body())
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert last.text() == calm
        told = server.end(0)
        for actor in ("personae/front/ingress", "personae/back/host", "back/executor", "back/scheduler"):
            assert re.search(rf"^{actor} +(idle|busy) +\d+/\d+ ", told, re.MULTILINE), (
                "SIGUSR1 shows every actor"
            )
        assert "Back's actors:" in told
        assert re.search(r"Thread 0x\w+ .*most recent call first", told), "and where Back's threads are"
        assert not Path(f"/proc/{back}").exists()


def idle(server: Served) -> bool:
    """Whether nothing runs and nothing waits."""
    metrics = httpx.get(f"{server.url}/metrics").text
    return len(re.findall(r"vllm:num_requests_(?:running|waiting)\{.*\} 0\.0", metrics)) == 2


def test_what_does_not_finish_in_time_is_ended_with_an_error_that_says_so() -> None:
    with serving("--drain-timeout", "0.1", "--log-format", "json") as server:
        stream = Stream(server, max_tokens=1000)
        stream.begun.wait(60)
        server.process.send_signal(signal.SIGTERM)
        stream.join(60)
        assert json.loads(stream.events[-1])["error"]["code"] == "shutting_down"
        lines = [json.loads(line) for line in server.end(0).splitlines() if line.startswith("{")]
        (answer,) = [line for line in lines if line["logger"] == "personae.access"]
        assert (answer["route"], answer["status"], answer["model"]) == ("/v1/completions", 200, server.model)


def test_a_second_signal_ends_at_once() -> None:
    with serving("--drain-timeout", "600") as server:
        back = server.back()
        os.kill(back, signal.SIGSTOP)  # nothing will finish
        stream = threading.Thread(target=broken_off, args=(server,))
        stream.start()
        time.sleep(0.5)
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        server.end(0)
        assert time.monotonic() - begun < 20
        stream.join(10)
        assert not Path(f"/proc/{back}").exists()


def broken_off(server: Served) -> None:
    with suppress(httpx.HTTPError):
        answer = httpx.post(f"{server.url}/v1/completions", json=server.body(stream=False), timeout=60)
        assert answer.status_code >= 500


def waits(server: Served) -> str:
    """The lines of the metrics that say that a sequence waits."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return "\n".join(line for line in lines if "requests_waiting" in line and not line.endswith(" 0.0"))


def test_an_engine_that_cannot_be_kept_is_said_to_everybody_and_by_the_exit_code() -> None:
    with serving("--max-restarts", "0", "--max-seqs", "1") as server:
        stream = Stream(server, max_tokens=1000)
        stream.begun.wait(60)
        waiting: list[httpx.Response] = []
        body = server.body(stream=False)
        queued = threading.Thread(
            target=lambda: waiting.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))
        )
        queued.start()
        eventually(lambda: 'requests_waiting{model_name="' in waits(server), "the second one waits")
        os.kill(server.back(), signal.SIGKILL)
        stream.join(60)
        assert json.loads(stream.events[-1])["error"]["code"] == "engine_lost"
        queued.join(60)
        (answer,) = waiting
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
        assert httpx.get(f"{server.url}/ready").status_code == 503
        refused = httpx.post(f"{server.url}/v1/completions", json=server.body())
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
        errors = server.end(3)
        assert errors.strip().splitlines()[-1].startswith("error: The engine failed too often")


def test_an_adapter_that_back_refuses_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    make_adapter_folder(tmp_path / "stranger", model_folder("llama", hidden_size=32), rank=2)
    server = Served(str(model_folder("qwen3")), "--device", "cpu", "--adapters", str(tmp_path))
    errors = server.end(2)
    assert server.first == ""
    assert "down_proj.lora_B.weight" in errors.strip().splitlines()[-1]
    assert "Traceback" not in errors
