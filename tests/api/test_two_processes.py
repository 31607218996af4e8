"""`personae serve` as it runs: two processes, killed, drained and lost."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from patience import PATIENCE, eventually
from served_program import WORDS, Served
from tiny_adapters import make_adapter_folder
from tiny_models import model_folder

ENDLESS = 100_000  # tokens: an answer that will run for as long as anybody here waits


class Stream(threading.Thread):
    """A streamed completion, read in a thread of its own."""

    def __init__(self, server: Served, **changes: Any) -> None:
        super().__init__(daemon=True)
        self.server, self.changes = server, changes
        self.events: list[str] = []
        self.comments = 0
        self.left = False
        self.start()

    def run(self) -> None:
        with (
            suppress(httpx.RemoteProtocolError),  # cut off: `text` and the tests see it
            httpx.Client(timeout=PATIENCE) as client,
            client.stream(
                "POST", f"{self.server.url}/v1/completions", json=self.server.body(**self.changes)
            ) as r,
        ):
            for line in r.iter_lines():
                self.comments += line.startswith(":")
                if line.startswith("data: "):
                    self.events.append(line[6:])
                if self.left:
                    return

    def begun(self) -> None:
        """Wait for the first event."""
        eventually(lambda: bool(self.events), "the stream begins")

    def goes_on_to(self, events: int) -> None:
        """Wait for so many events, then leave."""
        eventually(lambda: len(self.events) >= events, "the stream goes on")
        self.left = True
        self.join(PATIENCE)

    def last(self) -> str:
        """Wait for the last event."""
        self.join(PATIENCE)
        return self.events[-1]

    def text(self) -> str:
        assert self.last() == "[DONE]"
        return self.so_far()

    def so_far(self) -> str:
        parts = [json.loads(event) for event in self.events if event != "[DONE]"]
        return "".join(part["choices"][0]["text"] for part in parts)


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    model = model_folder("qwen3", max_position_embeddings=2 * ENDLESS)
    with Served(str(model), "--device", "cpu", "--kv-memory", "256MiB", *arguments) as server:
        assert server.url or server.end(0), server.first
        yield server


def test_a_killed_back_is_a_pause_and_sigterm_lets_answers_finish_and_refuses_others() -> None:
    with serving("--stream-ping-interval", "0.1") as server:
        calm = Stream(server).text()
        late = server.complete(max_tokens=ENDLESS, timeout=0.02)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        eventually(lambda: idle(server), "what was too late holds nothing")
        disturbed = Stream(server, max_tokens=ENDLESS)
        disturbed.begun()
        os.kill(server.back(), signal.SIGKILL)
        disturbed.goes_on_to(len(disturbed.events) + WORDS)
        assert disturbed.so_far().startswith(calm)
        assert disturbed.comments > 0, "the connection is not silent while the engine is loaded again"
        metrics = server.get("/metrics").text
        assert re.search(r"personae:engine_restarts_total\{.*\} 1\.0", metrics)

        back, before = server.back(), admitted(server)
        os.kill(back, signal.SIGSTOP)  # until everything has been asked
        last = Stream(server)
        eventually(lambda: admitted(server) > before, "the last request is there")
        server.process.send_signal(signal.SIGUSR1)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.get("/ready").status_code != 200, "it drains")
        refused = server.get("/ready")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        refused = server.complete()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert server.get("/health").status_code == 200
        os.kill(back, signal.SIGCONT)
        assert last.text() == calm
        server.end(0)
        delivered = server.errors
        for actor in (
            "personae/frontend/ingress",
            "personae/core/process",
            "core/executor",
            "core/scheduler",
        ):
            assert re.search(rf"^{actor} +(idle|busy) +\d+/\d+ ", delivered, re.MULTILINE), (
                "SIGUSR1 shows every actor"
            )
        assert "the engine core's actors:" in delivered
        assert re.search(r"Thread 0x\w+ .*most recent call first", delivered), (
            "and where the engine core's threads are"
        )
        assert not Path(f"/proc/{back}").exists()


def idle(server: Served) -> bool:
    """Whether nothing runs and nothing waits."""
    metrics = server.get("/metrics").text
    return len(re.findall(r"vllm:num_requests_(?:running|waiting)\{.*\} 0\.0", metrics)) == 2


def test_what_does_not_finish_in_time_is_ended_with_an_error_that_says_so() -> None:
    with serving("--drain-timeout", "0.1", "--log-format", "json") as server:
        stream = Stream(server, max_tokens=ENDLESS)
        stream.begun()
        server.process.send_signal(signal.SIGTERM)
        assert json.loads(stream.last())["error"]["code"] == "shutting_down"
        server.end(0)
        lines = [json.loads(line) for line in server.errors.splitlines() if line.startswith("{")]
        (answer,) = [line for line in lines if line["logger"] == "personae.access"]
        assert (answer["route"], answer["status"], answer["model"]) == ("/v1/completions", 200, server.model)


def test_a_second_signal_ends_at_once() -> None:
    with serving("--drain-timeout", "600") as server:
        back = server.back()
        os.kill(back, signal.SIGSTOP)  # nothing will finish
        stream = threading.Thread(target=broken_off, args=(server,), daemon=True)
        stream.start()
        eventually(lambda: admitted(server) > 0, "the request is there")
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.get("/ready").status_code == 503, "it drains")
        server.process.send_signal(signal.SIGTERM)
        server.end(0)
        stream.join(PATIENCE)
        assert not Path(f"/proc/{back}").exists()


def admitted(server: Served) -> float:
    """The prompts' tokens of all requests that have been admitted, as the frontend counts them."""
    return sum(map(float, re.findall(r"vllm:prompt_tokens_total\{.*\} (\S+)", server.get("/metrics").text)))


def broken_off(server: Served) -> None:
    with suppress(httpx.HTTPError):
        assert server.complete().status_code >= 500


def waits(server: Served) -> str:
    """The lines of the metrics that say that a sequence waits."""
    lines = server.get("/metrics").text.splitlines()
    return "\n".join(line for line in lines if "requests_waiting" in line and not line.endswith(" 0.0"))


def test_an_engine_that_cannot_be_kept_is_said_to_everybody_and_by_the_exit_code() -> None:
    with serving("--max-restarts", "0", "--max-seqs", "1") as server:
        stream = Stream(server, max_tokens=ENDLESS)
        stream.begun()
        waiting: list[httpx.Response] = []
        queued = threading.Thread(target=lambda: waiting.append(server.complete()), daemon=True)
        queued.start()
        eventually(lambda: 'requests_waiting{model_name="' in waits(server), "the second one waits")
        os.kill(server.back(), signal.SIGKILL)
        assert json.loads(stream.last())["error"]["code"] == "engine_lost"
        queued.join(PATIENCE)
        (answer,) = waiting
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
        assert server.get("/ready").status_code == 503
        refused = server.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
        server.end(3)
        assert server.errors.strip().splitlines()[-1].startswith("error: The engine failed too often")


def test_an_adapter_that_back_refuses_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    make_adapter_folder(tmp_path / "stranger", model_folder("llama", hidden_size=32), rank=2)
    with Served(str(model_folder("qwen3")), "--device", "cpu", "--adapters", str(tmp_path)) as server:
        server.end(2)
        errors = server.errors
    assert server.first == ""
    assert "down_proj.lora_B.weight" in errors.strip().splitlines()[-1]
    assert "Traceback" not in errors
