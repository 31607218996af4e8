"""What a server acknowledged is there after `kill -9`, and no tenant loses turns by what another one does.

    python -m personae.evals.durability kills --count 50
    python -m personae.evals.durability neighbours --runs 5 --turns 250

`kills`: clients store responses, answer in conversations (also as streams), begin responses in the
background, delete conversations, upload files and make batches. The server is killed at random moments and
started again with the same data directory. After each start, what clients were told is there must be there,
once: what they were told since the kill before, and at the end all of it.

`neighbours`: one tenant makes conversations, answers in them and deletes them as fast as it can. Meanwhile
turns of another one are answered. Each turn must be in its conversation, once, and no answer may be a 5xx.

Exit code 1 if anything is lost, doubled or failed.
"""

import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from personae.api import sse
from personae.api.bundled import NAMED
from personae.evals.served import Served

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
_TOKENS = 4
_READY_SECONDS = 120.0
app = typer.Typer(help=__doc__, no_args_is_help=True)


@dataclass
class Acknowledged:
    """What clients were told, over all servers. `turns` are the texts of a conversation's answered turns,
    `tried` those of all turns that were begun."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    responses: dict[str, str] = field(default_factory=dict)
    background: set[str] = field(default_factory=set)
    turns: dict[str, list[str]] = field(default_factory=dict)
    tried: Counter[str] = field(default_factory=Counter)
    deleted: set[str] = field(default_factory=set)
    files: dict[str, bytes] = field(default_factory=dict)
    batches: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def add(self, other: "Acknowledged") -> None:
        """Take over what another one has."""
        self.responses |= other.responses
        self.background |= other.background
        self.turns |= other.turns
        self.tried += other.tried
        self.deleted |= other.deleted
        self.files |= other.files
        self.batches |= other.batches
        self.failures += other.failures

    def count(self) -> int:
        """How many things were acknowledged."""
        kinds = (self.responses, self.background, self.deleted, self.files, self.batches)
        return sum(map(len, kinds)) + sum(map(len, self.turns.values()))


class Clients:
    """Clients of one server, each in a thread of its own, until it is killed."""

    def __init__(self, url: str, acknowledged: Acknowledged, seed: int) -> None:
        self._url = url
        self._acknowledged = acknowledged
        self._over = threading.Event()
        kinds: Sequence[Callable[[httpx.Client, random.Random], None]] = (
            self._store, self._turn, self._turn, self._stream, self._queue, self._delete, self._batch,
        )  # fmt: skip
        self._threads = [
            threading.Thread(target=self._loop, args=(kind, random.Random(f"{seed} {place}")))
            for place, kind in enumerate(kinds)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until all have noticed that the server is gone."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _loop(self, kind: Callable[[httpx.Client, random.Random], None], chance: random.Random) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._over.is_set():
                try:
                    kind(client, chance)
                except httpx.TransportError:
                    return
                except httpx.HTTPStatusError as error:
                    if error.response.status_code != 429:
                        with self._acknowledged.lock:
                            self._acknowledged.failures.append(f"{error}: {error.response.text[:200]}")
                    time.sleep(0.2)

    def _store(self, client: httpx.Client, chance: random.Random) -> None:
        done = _post(client, RESPONSES, asked("store"))
        with self._acknowledged.lock:
            self._acknowledged.responses[done["id"]] = text_of(done)

    def _turn(self, client: httpx.Client, chance: random.Random) -> None:
        self._answer_in(client, chance, lambda body: _post(client, RESPONSES, body))

    def _stream(self, client: httpx.Client, chance: random.Random) -> None:
        def ask(body: dict[str, Any]) -> dict[str, Any]:
            last: dict[str, Any] = {}
            with client.stream("POST", RESPONSES, json=body | {"stream": True}) as answer:
                for line in sse.lines(answer):
                    if line.startswith("data: "):
                        last = json.loads(line.removeprefix("data: "))
            if last.get("type") not in ("response.completed", "response.incomplete"):
                raise httpx.ReadError(f"the stream ended with {last.get('type')}")
            done: dict[str, Any] = last["response"]
            return done

        self._answer_in(client, chance, ask)

    def _answer_in(
        self,
        client: httpx.Client,
        chance: random.Random,
        ask: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        """Two turns in a new conversation."""
        id = _post(client, CONVERSATIONS, {})["id"]
        with self._acknowledged.lock:
            self._acknowledged.turns[id] = []
        for number in range(2):
            text = f"{id} {number} {chance.random()}"
            with self._acknowledged.lock:
                self._acknowledged.tried[text] += 1
            done = ask(asked(text) | {"conversation": id})
            with self._acknowledged.lock:
                self._acknowledged.turns[id].append(text)
                self._acknowledged.responses[done["id"]] = text_of(done)

    def _queue(self, client: httpx.Client, chance: random.Random) -> None:
        id = _post(client, RESPONSES, asked("queue") | {"background": True})["id"]
        with self._acknowledged.lock:
            self._acknowledged.background.add(id)
        time.sleep(chance.random() / 5)

    def _delete(self, client: httpx.Client, chance: random.Random) -> None:
        id = _post(client, CONVERSATIONS, {})["id"]
        _post(client, RESPONSES, asked("gone") | {"conversation": id, "store": False})
        client.delete(f"{CONVERSATIONS}/{id}").raise_for_status()
        with self._acknowledged.lock:
            self._acknowledged.deleted.add(id)

    def _batch(self, client: httpx.Client, chance: random.Random) -> None:
        body = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        content = json.dumps(line).encode()
        answer = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)})
        file = answer.raise_for_status().json()["id"]
        with self._acknowledged.lock:
            self._acknowledged.files[file] = content
        made = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = _post(client, "/v1/batches", made)["id"]
        with self._acknowledged.lock:
            self._acknowledged.batches.add(batch)
        time.sleep(chance.random() / 2)


def asked(text: str) -> dict[str, Any]:
    """A request for a short answer."""
    return {"model": "base", "input": text, "max_output_tokens": _TOKENS}


def text_of(response: dict[str, Any]) -> str:
    """What a response says."""
    return "".join(part["text"] for item in response["output"] for part in item.get("content") or ())


def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = client.post(path, json=body).raise_for_status().json()
    return answer


def turns_of(client: httpx.Client, conversation: str) -> list[tuple[str, str]]:
    """The role and the text of each item."""
    found: list[tuple[str, str]] = []
    after: dict[str, str] = {}
    while True:
        query = {"limit": "100", "order": "asc", **after}
        page = client.get(f"{CONVERSATIONS}/{conversation}/items", params=query).raise_for_status().json()
        found += [(item["role"], "".join(part["text"] for part in item["content"])) for item in page["data"]]
        if not page["has_more"]:
            return found
        after = {"after": page["data"][-1]["id"]}


def missing(client: httpx.Client, acknowledged: Acknowledged) -> list[str]:
    """What was acknowledged and is not there, or is there twice."""
    wrong: list[str] = []

    def check(what: str, path: str, status: int = 200) -> httpx.Response:
        answer = client.get(path)
        if answer.status_code != status:
            wrong.append(f"{what} {path}: {answer.status_code} {answer.text[:100]}")
        return answer

    for id, text in acknowledged.responses.items():
        answer = check("response", f"{RESPONSES}/{id}")
        if answer.status_code == 200 and text_of(answer.json()) != text:
            wrong.append(f"response {id}: another text")
    for id in acknowledged.background:
        check("background", f"{RESPONSES}/{id}")
    for id in acknowledged.deleted:
        check("deleted", f"{CONVERSATIONS}/{id}", 404)
    for id, content in acknowledged.files.items():
        answer = check("file", f"/v1/files/{id}/content")
        if answer.status_code == 200 and answer.content != content:
            wrong.append(f"file {id}: another content")
    for id in acknowledged.batches:
        check("batch", f"/v1/batches/{id}")
    for id, texts in acknowledged.turns.items():
        items = turns_of(client, id)
        said = [text for role, text in items if role == "user"]
        if [role for role, _ in items] != ["user", "assistant"] * len(said):
            wrong.append(f"conversation {id}: half a turn, {items}")
        if [text for text in said if text in texts] != texts or len(set(said)) != len(said):
            wrong.append(f"conversation {id}: {said} in place of {texts}")
        if not set(said) <= acknowledged.tried.keys():
            wrong.append(f"conversation {id}: turns of another one, {said}")
    return wrong


def _until_ended(client: httpx.Client, ids: Sequence[str]) -> list[str]:
    """Wait until responses have ended; returns those that are not complete."""
    left, wrong = set(ids), list[str]()
    ends = time.monotonic() + _READY_SECONDS
    while left and time.monotonic() < ends:
        for id in tuple(left):
            status = client.get(f"{RESPONSES}/{id}").json().get("status")
            if status not in ("queued", "in_progress"):
                left.discard(id)
                if status not in ("completed", "incomplete"):
                    wrong.append(f"background {id}: {status}")
        time.sleep(0.1)
    return wrong + [f"background {id}: it does not end" for id in left]


def play_kills(
    arguments: Sequence[str], folder: Path, count: int, seed: int, longest: float = 2.0
) -> tuple[Acknowledged, list[str]]:
    """Kill a server `count` times, each after up to `longest` seconds of requests. Returns what was
    acknowledged, and what is wrong."""
    acknowledged, wrong, chance = Acknowledged(), list[str](), random.Random(seed)
    options = [*arguments, "--served-model-name", "base", "--data-dir", str(folder / "data")]
    recent = Acknowledged()
    for number in range(count + 1):
        with (
            Served(options, folder / f"server-{number}.log") as server,
            httpx.Client(base_url=server.url, timeout=60) as client,
        ):
            wrong += [f"after {number} kills: {each}" for each in missing(client, recent)]
            acknowledged.add(recent)
            if number == count:
                wrong += missing(client, acknowledged)
                wrong += _until_ended(client, sorted(acknowledged.background))
                break
            recent = Acknowledged()
            clients = Clients(server.url, recent, seed + number)
            clients.start()
            time.sleep(chance.uniform(0.1, longest))
            server.kill()
            clients.join()
    return acknowledged, wrong + acknowledged.failures


@dataclass
class Neighbours:
    """The result of a run: turns of one tenant, those that were lost, conversations that the other one
    deleted, and answers by status."""

    turns: int = 0
    lost: int = 0
    deleted: int = 0
    statuses: Counter[int] = field(default_factory=Counter)


def play_neighbours(url: str, key: Callable[[str], str], turns: int, loops: int = 3) -> Neighbours:
    """One tenant's turns, while another one runs `loops`. `key` makes a key of a tenant."""
    result, over, lock = Neighbours(), threading.Event(), threading.Lock()

    def client_of(tenant: str) -> httpx.Client:
        def count(answer: httpx.Response) -> None:
            with lock:
                result.statuses[answer.status_code] += 1

        headers = {"authorization": f"Bearer {key(tenant)}"}
        return httpx.Client(base_url=url, headers=headers, timeout=60, event_hooks={"response": [count]})

    def churn() -> None:
        with client_of("churn") as client:
            while not over.is_set():
                id = client.post(CONVERSATIONS, json={}).json()["id"]
                client.post(RESPONSES, json=asked("x") | {"conversation": id})
                client.delete(f"{CONVERSATIONS}/{id}")
                with lock:
                    result.deleted += 1

    threads = [threading.Thread(target=churn) for _ in range(loops)]
    with client_of("turns") as client:
        for thread in threads:
            thread.start()
        try:
            while result.turns < turns:
                id = client.post(CONVERSATIONS, json={}).json()["id"]
                answered = []
                for number in range(5):
                    body = asked(f"{number}") | {"conversation": id}
                    if client.post(RESPONSES, json=body).status_code == 200:
                        answered.append(f"{number}")
                said = [text for role, text in turns_of(client, id) if role == "user"]
                result.turns += len(answered)
                result.lost += len(set(answered) - set(said)) + len(said) - len(set(said))
        finally:
            over.set()
            for thread in threads:
                thread.join()
    return result


ModelArgument = Annotated[str, typer.Argument(help="As `personae serve` takes it.")]


@app.command()
def kills(
    model: ModelArgument = str(NAMED),
    count: Annotated[int, typer.Option(min=1, help="How often the server is killed.")] = 50,
    seed: int = 0,
) -> None:
    """Kill a server at random moments."""
    with tempfile.TemporaryDirectory(prefix="personae-durability-") as folder:
        acknowledged, wrong = play_kills([model], Path(folder), count, seed)
    for each in wrong:
        print(each)
    print(f"{count} kills: {acknowledged.count()} acknowledged, {len(wrong)} lost, doubled or failed")
    raise typer.Exit(1 if wrong else 0)


@app.command()
def neighbours(
    model: ModelArgument = str(NAMED),
    runs: Annotated[int, typer.Option(min=1)] = 5,
    turns: Annotated[int, typer.Option(min=1, help="Of each run.")] = 250,
) -> None:
    """Answer one tenant's turns while another one deletes conversations."""
    failed = False
    with tempfile.TemporaryDirectory(prefix="personae-durability-") as folder:
        options = [model, "--served-model-name", "base", "--data-dir", str(Path(folder) / "data")]
        with Served(options, Path(folder) / "server.log") as server:
            admin = _first_admin(server.url)

            def key(tenant: str) -> str:
                headers = {"authorization": f"Bearer {admin}"}
                with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
                    client.post("/v1/tenants", json={"name": tenant})
                    return str(_post(client, "/v1/keys", {"tenant": tenant})["secret"])

            for number in range(runs):
                found = play_neighbours(server.url, key, turns)
                print(
                    f"run {number + 1}: {found.lost} of {found.turns} turns lost, {found.deleted} "
                    f"conversations deleted beside them, answers by status {dict(found.statuses)}",
                    flush=True,
                )
                failed |= bool(found.lost or any(status >= 500 for status in found.statuses))
    raise typer.Exit(1 if failed else 0)


def _first_admin(url: str) -> str:
    """Make the key that all requests need from then on."""
    with httpx.Client(base_url=url, timeout=60) as client:
        client.post("/v1/tenants", json={"name": "admins"}).raise_for_status()
        return str(_post(client, "/v1/keys", {"tenant": "admins", "role": "admin"})["secret"])


if __name__ == "__main__":
    app()
