"""`personae serve --http-workers 2` as it runs. The kernel gives each new connection to one of the workers.
So what must hold at every worker is asked on many connections."""

import json
import os
import re
import signal
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import PATIENCE, eventually
from programs import Program
from tiny_adapters import make_adapter_folder
from tiny_models import model_folder

from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE

MANY = 10  # connections: all at one worker once in 512 times, and then the test only shows less
ENDLESS = 100_000  # tokens: an answer that runs for as long as anybody here waits
ROOT = "root-key"
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # once, because making one takes long

BLOCKER = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "transformers", "safetensors"):
            raise AssertionError(f"an HTTP worker imports {name}")

if "personae.api.http_workers.worker" in sys.orig_argv:
    sys.meta_path.insert(0, Refuse())
"""


class Served(Program):
    """A server with two workers that cannot import torch."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        (folder / "blocker").mkdir()
        (folder / "blocker" / "sitecustomize.py").write_text(BLOCKER)
        model = model_folder("qwen3", max_position_embeddings=2 * ENDLESS)
        super().__init__(
            *("-m", "personae", "serve", str(model), "--port", "0", "--served-model-name", "base"),
            *("--device", "cpu", "--kv-memory", "256MiB", "--http-workers", "2"),
            *("--data-dir", str(folder / "data"), "--engine-grace", "0", *arguments),
            paths=(folder / "blocker",),
            env={"PERSONAE_SERVER_KEY": ROOT},
        )
        first = self.line()
        found = re.match(r"personae ready (\S+) model=base", first)
        if found is None:
            self.process.kill()
            with self:
                self.process.wait(PATIENCE)
                pytest.fail(f"the server did not start: {first} {self.errors}")
        self.url = found[1]

    def workers(self) -> list[int]:
        """The process ids of the workers."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.process.pid), "-f", "http_workers.worker"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        return [int(pid) for pid in found.stdout.split()]

    def ask(self, method: str, path: str, key: str = ROOT, **what: Any) -> httpx.Response:
        """One request on a connection of its own."""
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(timeout=PATIENCE, verify=NO_TLS) as client:
            return client.request(method, f"{self.url}{path}", headers=headers, **what)

    def many(self, method: str, path: str, key: str = ROOT, **what: Any) -> list[int]:
        """The statuses of the same request on many connections."""
        return [self.ask(method, path, key, **what).status_code for _ in range(MANY)]

    def made(self, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        """What a POST answers."""
        answer = self.ask("POST", path, json=body)
        assert answer.status_code == status, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def number(self, name: str) -> float:
        """The sum of a metric's series."""
        text = self.ask("GET", "/metrics").text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    def idle(self) -> bool:
        """Whether no sequence runs or waits, and no request is in progress."""
        sequences = self.number("vllm:num_requests_running") + self.number("vllm:num_requests_waiting")
        return not sequences and self.ask("GET", "/load").json() == {"server_load": 0}


COMPLETION = {"model": "base", "prompt": "Once", "max_tokens": 4}
TOKENIZE = {"model": "base", "prompt": "Once"}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("served")) as served:
        yield served


def test_an_adapter_that_one_worker_takes_serves_at_all_at_once_and_is_gone_at_once(
    server: Served, tmp_path: Path
) -> None:
    folder = make_adapter_folder(tmp_path / "late", model_folder("qwen3"), rank=4, seed=1)
    files = {file: (folder / file).read_bytes() for file in (CONFIG_FILE, TENSORS_FILE)}
    made = server.ask("POST", "/v1/adapters", data={"name": "late"}, files=files)
    assert made.status_code == 201, made.text
    assert server.many("POST", "/v1/completions", json={**COMPLETION, "model": "late"}) == [200] * MANY
    mixed = {**COMPLETION, "adapters": [{"name": "late", "weight": 0.5}]}
    assert server.made("/v1/completions", mixed)["choices"]
    assert server.ask("DELETE", "/v1/adapters/late").status_code == 200
    gone = server.ask("POST", "/v1/completions", json={**COMPLETION, "model": "late"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert server.many("POST", "/v1/completions", json={**COMPLETION, "model": "late"}) == [404] * MANY


def test_a_key_is_valid_at_all_workers_when_it_is_made_and_at_none_when_it_is_revoked(server: Served) -> None:
    server.made("/v1/tenants", {"name": "ann"}, 201)
    key = server.made("/v1/keys", {"tenant": "ann"}, 201)
    assert server.many("POST", "/tokenize", key["secret"], json=TOKENIZE) == [200] * MANY
    assert server.ask("DELETE", f"/v1/keys/{key['id']}").status_code == 200
    assert server.many("POST", "/tokenize", key["secret"], json=TOKENIZE) == [401] * MANY


def test_a_tenants_rate_is_one_over_all_workers(server: Served) -> None:
    server.made("/v1/tenants", {"name": "slow", "limits": {"requests_per_minute": 3}}, 201)
    key = server.made("/v1/keys", {"tenant": "slow"}, 201)["secret"]
    begun = time.monotonic()
    statuses = server.many("POST", "/tokenize", key, json=TOKENIZE)
    refilled = int((time.monotonic() - begun) * 3 / 60) + 1
    assert 3 <= statuses.count(200) <= 3 + refilled
    assert set(statuses) == {200, 429}


def test_a_tenants_tokens_are_one_budget_over_all_workers(server: Served) -> None:
    server.made("/v1/tenants", {"name": "brief", "limits": {"tokens_per_minute": 5}}, 201)
    key = server.made("/v1/keys", {"tenant": "brief"}, 201)["secret"]
    statuses = server.many("POST", "/v1/completions", key, json={**COMPLETION, "max_tokens": 100})
    assert statuses.count(200) == 1, "its answer has put the tenant in debt for twenty minutes"


def test_metrics_are_those_of_all_workers(server: Served) -> None:
    count, tokens = "personae:http_requests_total", "vllm:generation_tokens_total"
    here = 'personae:http_requests_total{method="POST",route="/detokenize"'
    before, generated = server.number(here), server.number(tokens)
    assert server.many("POST", "/detokenize", json={"tokens": [1, 2]}) == [200] * MANY
    assert server.number(here) == before + MANY
    asked = {**COMPLETION, "ignore_eos": True}
    assert server.many("POST", "/v1/completions", json=asked) == [200] * MANY
    assert server.number(tokens) == generated + MANY * 4
    assert server.number(f"{count}{{") > MANY
    lines = server.ask("GET", "/metrics").text.splitlines()
    series = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series)), "each series once"


def test_answers_of_every_kind_come_from_workers(server: Served) -> None:
    chat = {"model": "base", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
    bound = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    for _ in range(3):
        answer = server.made("/v1/chat/completions", {**chat, "response_format": bound})
        assert json.loads(answer["choices"][0]["message"]["content"]).keys() == {"n"}
    tool = {"type": "function", "function": {"name": "count", "parameters": SCHEMA, "strict": True}}
    called = server.made("/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": "required"})
    [call] = called["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]).keys() == {"n"}
    assert server.made("/v1/embeddings", {"model": "base", "input": "Once"})["data"]
    assert server.made("/v1/messages", {**chat, "max_tokens": 4})["content"]
    for path in ("/health", "/ready", "/console", "/openapi.json", "/v1/models"):
        assert server.many("GET", path) == [200] * MANY, path
    wrong = server.ask("POST", "/v1/chat/completions", json={**chat, "response_format": {"type": "no"}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "response_format.type")


def test_a_response_is_stored_for_all_workers_before_its_client_has_it(server: Served) -> None:
    last = server.made("/v1/responses", {"input": "Hi", "max_output_tokens": 4})["id"]
    for _ in range(MANY):
        follows = {"input": "and", "max_output_tokens": 4, "previous_response_id": last}
        last = server.made("/v1/responses", follows)["id"]
    assert server.ask("GET", f"/v1/responses/{last}").json()["id"] == last
    conversation = server.made("/v1/conversations", {})["id"]
    for _ in range(3):
        server.made("/v1/responses", {"input": "x", "max_output_tokens": 4, "conversation": conversation})
    items = server.ask("GET", f"/v1/conversations/{conversation}/items").json()["data"]
    assert len(items) >= 3
    asked = {"input": "Hi", "max_output_tokens": 4, "temperature": 0, "background": True}
    queued = server.made("/v1/responses", asked)
    assert queued["status"] == "queued"
    path = f"/v1/responses/{queued['id']}"
    eventually(lambda: server.ask("GET", path).json()["status"] == "incomplete", "it is made")


def test_a_batch_runs_where_the_files_are(server: Served) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": COMPLETION}
    upload = {"file": ("in.jsonl", json.dumps(line).encode())}
    file = server.ask("POST", "/v1/files", data={"purpose": "batch"}, files=upload).json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    path = f"/v1/batches/{server.made('/v1/batches', batch)['id']}"
    eventually(lambda: server.ask("GET", path).json()["status"] == "completed", "the batch is done")
    output = server.ask("GET", path).json()["output_file_id"]
    answer = json.loads(server.ask("GET", f"/v1/files/{output}/content").text)
    assert answer["response"]["status_code"] == 200


def streams(server: Served, count: int) -> list[httpx.Response]:
    """Endless answers that have begun, each on a connection of its own."""
    body = {**COMPLETION, "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
    found = []
    for _ in range(count):
        client = httpx.Client(timeout=PATIENCE, verify=NO_TLS, headers={"authorization": f"Bearer {ROOT}"})
        request = client.build_request("POST", f"{server.url}/v1/completions", json=body)
        found.append(client.send(request, stream=True))
        assert found[-1].status_code == 200
    return found


def test_a_client_that_leaves_leaves_nothing_in_any_process(server: Served) -> None:
    for stream in streams(server, 4):
        stream.close()
    eventually(server.idle, "nothing runs")


def test_a_killed_worker_ends_its_own_answers_only_and_is_replaced(server: Served) -> None:
    before = server.workers()
    assert len(before) == 2
    running = streams(server, 6)
    lines: list[Callable[[], str]] = [stream.iter_lines().__next__ for stream in running]
    for line in lines:
        assert line()
    os.kill(before[0], signal.SIGKILL)
    eventually(lambda: len(set(server.workers()) - set(before)) == 1, "another takes its place")
    assert before[1] in server.workers()
    cut = 0
    for line in lines:
        try:
            for _ in range(2000):  # what had arrived before
                line()
        except httpx.RemoteProtocolError:
            cut += 1
    live = len(running) - cut
    eventually(lambda: server.number("vllm:num_requests_running") == live, "the others go on")
    assert server.many("POST", "/v1/completions", json=COMPLETION) == [200] * MANY
    for stream in running:
        with closing(stream):
            pass
    eventually(server.idle, "nothing is left of the killed worker's requests")


def test_sigterm_lets_answers_finish_at_every_worker(tmp_path: Path) -> None:
    with Served(tmp_path, "--drain-timeout", "600") as server:
        body = {**COMPLETION, "max_tokens": 400, "ignore_eos": True, "stream": True}
        clients = [httpx.Client(timeout=PATIENCE, verify=NO_TLS) for _ in range(4)]
        headers = {"authorization": f"Bearer {ROOT}"}
        asked = [
            client.send(
                client.build_request("POST", f"{server.url}/v1/completions", json=body, headers=headers),
                stream=True,
            )
            for client in clients
        ]
        server.process.send_signal(signal.SIGTERM)
        for answer in asked:
            assert answer.read().endswith(b"data: [DONE]\n\n")
        server.end(0)
        for client in clients:
            client.close()


def test_workers_that_cannot_start_are_a_start_up_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os, sys\nif 'personae.api.http_workers.worker' in sys.orig_argv: os._exit(7)\n"
    )
    arguments = ("--port", "0", "--device", "cpu", "--kv-memory", "64MiB", "--http-workers", "2")
    model = str(model_folder("qwen3"))
    with Program("-m", "personae", "serve", model, *arguments, paths=(broken,)) as server:
        server.end(2)
        assert "An HTTP worker ended with code 7 before it served." in server.errors
