"""A conversation with a running server: what was said, and the requests for what is said next."""

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from personae.api import sse
from personae.api.commands.remote import refusal, server_root, unreachable

_PATIENCE = httpx.Timeout(10.0, read=None)


class Said(NamedTuple):
    """A piece of an answer, or of the reasoning before it."""

    text: str
    reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the latest answer took."""

    prompt: int
    cached: int
    completion: int
    reasoning: int


class ChatFailed(Exception):
    """The server refused, or is not there; the message is for the user."""


class Conversation:
    """What was said so far, and with whom. The server keeps nothing between two answers."""

    def __init__(
        self,
        url: str,
        model: str | None,
        system: str | None,
        client: httpx.Client | None = None,
        *,
        key: str | None = None,
    ) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._client = client or httpx.Client(base_url=server_root(url), timeout=_PATIENCE, headers=headers)
        self.system = system
        self.schema: dict[str, Any] | bool | None = None
        self.tokens: Tokens | None = None
        self.messages: list[dict[str, str]] = []
        self._model: str | None = None
        self._asked = model

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    @property
    def model(self) -> str:
        """The model or adapter that answers; the server's first if none was chosen. Raises ChatFailed."""
        if self._model is None:
            self._model = self.models()[0] if self._asked is None else self._known(self._asked)
        return self._model

    @model.setter
    def model(self, name: str) -> None:
        self._model = self._known(name)

    def _known(self, name: str) -> str:
        known = self.models()
        if name not in known:
            raise ChatFailed(f"no such model; there are {', '.join(known)}")
        return name

    def models(self) -> list[str]:
        """The names that the server serves. Raises ChatFailed."""
        try:
            response = self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise ChatFailed(unreachable(str(self._client.base_url), error)) from None
        if response.is_error:
            raise ChatFailed(refusal(response))
        return [card["id"] for card in response.json()["data"]]

    def use_schema(self, text: str) -> None:
        """Bind answers to a JSON Schema: its text, or a file that has it. Raises ChatFailed."""
        try:
            schema = json.loads(text if text.startswith(("{", "[")) else Path(text).read_text("utf-8"))
        except OSError as error:
            raise ChatFailed(f"{text}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ChatFailed(f"the schema is no valid JSON: {error}") from None
        if not isinstance(schema, dict):
            raise ChatFailed("a schema is a JSON object")
        self.schema = schema

    def ask(self, text: str) -> Generator[Said, None, None]:
        """Say `text` and iterate over the answer as it comes. Sampling is the model's own.

        What has come when the iterator is closed is the answer that is remembered. Raises ChatFailed; then
        nothing is.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {"model": self.model, "messages": system + asked, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.schema is not None:
            form = {"name": "answer", "schema": self.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        answer = ""
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise ChatFailed(refusal(response))
                for piece in self._pieces(response):
                    if not piece.reasoning:
                        answer += piece.text
                    yield piece
        except httpx.HTTPError as error:
            raise ChatFailed(f"the connection broke: {error}") from None
        finally:
            if answer:
                self.messages = [*asked, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forget what was said; the system message stays."""
        self.messages = []

    def _pieces(self, response: httpx.Response) -> Iterator[Said]:
        for line in sse.lines(response):
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ChatFailed(event["error"]["message"])
            if usage := event.get("usage"):
                self.tokens = _tokens(usage)
            for choice in event["choices"]:
                delta = choice["delta"]
                if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                    yield Said(thought, reasoning=True)
                if content := delta.get("content"):
                    yield Said(content)


def _tokens(usage: dict[str, Any]) -> Tokens:
    """The counts of an answer; a server may leave the details out."""
    prompt, completion = (usage.get(f"{name}_tokens_details") or {} for name in ("prompt", "completion"))
    return Tokens(
        usage["prompt_tokens"],
        prompt.get("cached_tokens") or 0,
        usage["completion_tokens"],
        completion.get("reasoning_tokens") or 0,
    )
