"""The frontend's process of `personae serve` is small: it computes nothing, so it never loads torch."""

import signal
from pathlib import Path
from typing import Any

import httpx
from patience import PATIENCE
from programs import Program
from tiny_adapters import make_adapter_folder
from tiny_models import model_folder

from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE

SERVE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "transformers", "safetensors"):
            raise AssertionError(f"the frontend imports {name}")

sys.meta_path.insert(0, Refuse())
from personae.api.cli import main
try:
    main()
finally:
    loaded = {name.partition(".")[0] for name in sys.modules}
    print("loaded", sorted(loaded & {"torch", "triton", "transformers", "safetensors"}))
"""


def test_the_frontend_process_never_imports_torch(tmp_path: Path) -> None:
    base = model_folder("qwen3")
    adapters = tmp_path / "adapters"
    make_adapter_folder(adapters / "first", base, rank=4, seed=1)
    another = make_adapter_folder(tmp_path / "another", base, rank=4, seed=2)
    arguments = ("--device", "cpu", "--kv-memory", "64MiB", "--adapters", str(adapters))
    with Program(
        "-c", SERVE, "serve", str(base), "--port", "0", "--served-model-name", "base", *arguments
    ) as server:
        first = server.line()
        assert first.startswith("personae ready "), (first, server.end(0), server.errors)
        with httpx.Client(base_url=first.split()[2], timeout=PATIENCE) as client:
            answers = ask_everything(client)
            uploaded = upload(client, "second", another)
            mixed = client.post(
                "/v1/completions",
                json={**COMPLETION, "adapters": [{"name": "first", "weight": 0.5}, {"name": "second"}]},
            )
        server.process.send_signal(signal.SIGTERM)
        assert server.end(0).splitlines()[-1] == "loaded []", server.errors
    assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(answers, 200)
    assert uploaded.status_code == 201, uploaded.text
    assert mixed.status_code == 200, mixed.text


COMPLETION: dict[str, Any] = {"model": "base", "prompt": "Once", "max_tokens": 4}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def ask_everything(client: httpx.Client) -> dict[str, httpx.Response]:
    """An answer of each kind, by its route."""
    chat = {"model": "first", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    bound = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {**COMPLETION, "logprobs": 2, "stream": True},
        "/v1/chat/completions": {**chat, "response_format": bound},
        "/v1/embeddings": {"model": "base", "input": "Once"},
        "/tokenize": {"model": "base", "prompt": "Once"},
    }
    answers = {path: client.post(path, json=body) for path, body in asked.items()}
    return answers | {
        path: client.get(path) for path in ("/metrics", "/v1/models", "/health", "/openapi.json")
    }


def upload(client: httpx.Client, name: str, folder: Path) -> httpx.Response:
    files = {file: (folder / file).read_bytes() for file in (CONFIG_FILE, TENSORS_FILE)}
    return client.post("/v1/adapters", data={"name": name}, files=files)
