"""How to write a check: an async function that sends requests to a server, registered for the test it
restates.

    @check("vLLM", "completion/test_completion.py", "test_no_logprobs")
    async def no_logprobs(server: Server) -> None:
        choice = await server.complete(prompt=[9, 9], max_tokens=5)
        expect(choice["logprobs"] is None, "no log-probabilities that nobody asked for")
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from personae.evals.harness.target import Body

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
JSON = {"content-type": "application/json"}


class Unlike(Exception):
    """The server behaves differently. The message says what was expected."""


def expect(holds: object, what: str) -> None:
    """Raises Unlike unless it holds."""
    if not holds:
        raise Unlike(what)


class Refusal(msgspec.Struct, frozen=True):
    """A status of 400 or more, with its error."""

    status: int
    error: Body


class Server:
    """The server as a check sees it: one model, greedy and with a seed unless a request says otherwise."""

    def __init__(self, client: httpx.AsyncClient, model: str, seed: int) -> None:
        self.client = client
        self.model = model
        self._sampling = {"temperature": 0.0, "seed": seed}

    async def get(self, path: str) -> httpx.Response:
        """A GET below the server's root."""
        return await self.client.get(path)

    async def send(self, path: str, **fields: Any) -> httpx.Response:
        """A POST with exactly these fields."""
        return await self.client.post(path, json=fields)

    async def answer(self, path: str, **fields: Any) -> Body:
        """The answer to a request, which must be a 200. `model` and sampling are added."""
        response = await self.send(path, **self._complete(path, fields))
        expect(response.status_code == 200, f"a 200, not {response.status_code}: {response.text[:300]}")
        answer: Body = response.json()
        return answer

    async def chat(self, text: str = "Hello!", **fields: Any) -> Body:
        """The only choice of a chat completion."""
        return only(await self.answer(CHAT, **{"messages": user(text), **fields}))

    async def complete(self, **fields: Any) -> Body:
        """The only choice of a completion."""
        return only(await self.answer(TEXT, **{"prompt": "Once upon a time", **fields}))

    async def refused(self, path: str, **fields: Any) -> Refusal:
        """The rejection of a request, which must be a 400 with an error of OpenAI's shape."""
        response = await self.send(path, **self._complete(path, fields))
        if response.status_code == 200 and fields.get("stream"):
            error = next((event["error"] for event in events_of(response.text) if "error" in event), None)
            expect(error, "an error, in the stream at the latest")
            return Refusal(200, error or {})
        expect(response.status_code == 400, f"a 400, not {response.status_code}")
        error = response.json().get("error")
        expect(isinstance(error, dict) and error.get("message"), "an error with a message")
        return Refusal(response.status_code, error)

    async def stream(self, path: str, **fields: Any) -> list[Body]:
        """The events of a streamed answer, which ends with [DONE] if the API has that."""
        body = self._complete(path, {**fields, "stream": True})
        response = await self.send(path, **body)
        expect(response.status_code == 200, f"a 200, not {response.status_code}: {response.text[:300]}")
        if path != RESPONSES:
            expect(response.text.rstrip().endswith("data: [DONE]"), "[DONE] at the end")
        events = events_of(response.text)
        expect(not any("error" in event for event in events), "no error in the stream")
        return events

    def _complete(self, path: str, fields: Body) -> Body:
        sampling = self._sampling if path in (CHAT, TEXT) else {}
        return {"model": self.model, **sampling, **fields}


def events_of(text: str) -> list[Body]:
    """The JSON of server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def user(text: str) -> list[Body]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def only(answer: Body) -> Body:
    """The single choice of an answer."""
    expect(len(answer["choices"]) == 1, "one choice")
    choice: Body = answer["choices"][0]
    return choice


def text_of(events: list[Body], index: int = 0) -> str:
    """The text of a streamed choice, for either kind of completion."""
    choices = [one for event in events for one in event["choices"] if one["index"] == index]
    return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices)


def finishes(events: list[Body]) -> list[str]:
    """The finish reasons of a stream's choices, in order."""
    choices = [one for event in events for one in event["choices"]]
    return [one["finish_reason"] for one in choices if one.get("finish_reason")]


Check = Callable[[Server], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Restated:
    """One check: the test and file that it restates, and, if we intentionally differ, how."""

    project: str
    file: str
    test: str
    run: Check
    differs: str = ""

    @property
    def id(self) -> str:
        """Its name in results."""
        return f"{self.project}: {self.file}::{self.test}"


CHECKS: list[Restated] = []


def check(project: str, file: str, *tests: str, differs: str = "") -> Callable[[Check], Check]:
    """Registers a check for the tests that it restates. With `differs`, it checks our own behaviour
    instead."""

    def register(run: Check) -> Check:
        CHECKS.extend(Restated(project, file, test, run, differs) for test in tests)
        return run

    return register
