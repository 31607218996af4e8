"""What one tenant sends to keep a server from serving the others: requests as bytes, and their senders."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

MIB = 2**20
BODY = 8 * MIB  # the most that a server takes by default
Way = Literal["ask", "hold", "leave"]

_SENDER = """
import collections, json, os, socket, sys, threading, time
os.nice(19)
host, port, path, way, clients, seconds = sys.argv[1:]
request, ends = open(path, "rb").read(), time.monotonic() + float(seconds)
seen, lock = collections.Counter(), threading.Lock()

def visit(connection):
    if way == "hold":
        connection.sendall(request[:-len(request) // 8])
        time.sleep(max(ends - time.monotonic(), 0))
        return "held"
    connection.sendall(request)
    if way == "leave":
        return "left"
    answer = connection.recv(65536)
    status = answer[9:12].decode() or "closed"
    while connection.recv(65536):
        pass
    return status

def run():
    while time.monotonic() < ends:
        begun, kind = time.monotonic(), "closed"
        try:
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                kind = visit(connection)
        except OSError:
            pass
        with lock:
            seen[kind] += 1
        time.sleep(max(0.02 - (time.monotonic() - begun), 0))

threads = [threading.Thread(target=run, daemon=True) for _ in range(int(clients))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(max(ends + 5 - time.monotonic(), 0))
print(json.dumps(seen))
"""


@dataclass(frozen=True)
class Attack:
    """This many clients at once, each of which sends this body again and again.

    way: "ask" reads the answer, "hold" sends most of the body and waits, "leave" disconnects at once. A body
    for /v1/files is a batch's file; the batch is then created repeatedly.
    """

    path: str
    body: Callable[[str], bytes]
    clients: int = 8
    way: Way = "ask"


def words(size: int) -> str:
    """Text of this many bytes in which every other character begins a token."""
    return "a b " * (size // 4)


def _chat(model: str, **fields: Any) -> bytes:
    message = {"role": "user", "content": "Hello"}
    return json.dumps({"model": model, "messages": [message], "max_tokens": 1, **fields}).encode()


def _prompt(model: str, prompt: Any, **fields: Any) -> bytes:
    return json.dumps(
        {"model": model, "prompt": prompt, "max_tokens": 1, **fields}, separators=(",", ":")
    ).encode()


def _tools(model: str) -> bytes:
    kept = {"type": "object", "properties": {}}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "description": words(60_000), "parameters": kept}}
        for n in range(128)
    ]
    return _chat(model, tools=tools)


def _prompts(model: str, count: int, tokens: int, **fields: Any) -> bytes:
    return _prompt(model, [[100 + (n + i) % 900 for i in range(tokens)] for n in range(count)], **fields)


def _batch(model: str) -> bytes:
    """A batch's file: each line is a request with a prompt of 4 MiB."""
    body = {"model": model, "prompt": words(4 * MIB)}
    lines = [
        json.dumps({"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": body})
        for n in range(16)
    ]
    return "\n".join(lines).encode()


ATTACKS: dict[str, Attack] = {
    "chat, a message of 8 MiB": Attack(
        "/v1/chat/completions",
        lambda model: _chat(model, messages=[{"role": "user", "content": words(BODY - 1000)}]),
    ),
    "chat, 128 tools of 60 kB": Attack("/v1/chat/completions", _tools),
    "completions, a prompt of 8 MiB": Attack(
        "/v1/completions", lambda model: _prompt(model, words(BODY - 1000))
    ),
    "completions, truncated from 8 MiB": Attack(
        "/v1/completions",
        lambda model: _prompt(model, words(BODY - 1000), truncate_prompt_tokens=16),
    ),
    "completions, 1,000,000 token ids": Attack("/v1/completions", lambda model: _prompt(model, [1] * 10**6)),
    "completions, 4,000,000 token ids": Attack(
        "/v1/completions", lambda model: _prompt(model, [1] * (4 * 10**6))
    ),
    "responses, an input of 8 MiB": Attack(
        "/v1/responses",
        lambda model: json.dumps({"model": model, "input": words(BODY - 1000)}).encode(),
    ),
    "/tokenize of 8 MiB": Attack(
        "/tokenize", lambda model: json.dumps({"model": model, "prompt": words(BODY - 1000)}).encode()
    ),
    "batches with lines of 4 MiB": Attack("/v1/files", _batch, clients=1),
    "JSON of 2,700,000 arrays": Attack(
        "/v1/completions",
        lambda model: _prompt(model, "a", guided_json={"enum": [[]] * 2_700_000}),
    ),
    "JSON of 60,000 arrays": Attack(
        "/tokenize",
        lambda model: json.dumps(
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": [[]] * 60_000}}
        ).encode(),
    ),
    "prompt_logprobs of 64 x 2,040 x 20": Attack(
        "/v1/completions", lambda model: _prompts(model, 64, 2040, prompt_logprobs=20)
    ),
    "prompt_logprobs of 6 x 2,040 x 20": Attack(
        "/v1/completions", lambda model: _prompts(model, 6, 2040, prompt_logprobs=20), clients=2
    ),
    "the same without prompt_logprobs": Attack(
        "/v1/completions", lambda model: _prompts(model, 6, 2040), clients=2
    ),
    "300 bodies that stop at 7 MiB": Attack(
        "/v1/completions",
        lambda model: _prompt(model, words(BODY - 1000)),
        clients=300,
        way="hold",
    ),
    "clients that leave, 8 MiB each": Attack(
        "/v1/completions",
        lambda model: _prompt(model, words(BODY - 1000)),
        clients=32,
        way="leave",
    ),
}


def http_request(path: str, key: str, body: bytes) -> bytes:
    """The whole request, on its own connection."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def sender(host: str, port: int, file: str, way: Way, clients: int, seconds: float) -> list[str]:
    """The command of a process that sends a file's request and prints the response."""
    return [sys.executable, "-IS", "-c", _SENDER, host, f"{port}", file, way, f"{clients}", f"{seconds}"]
