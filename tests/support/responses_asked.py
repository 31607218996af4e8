"""The requests of the tests of `POST /v1/responses`."""

import json
from typing import Any

import asgi
from fake_engine import FakeEngine
from starlette.applications import Starlette

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
SHELL: dict[str, Any] = {"type": "custom", "name": "shell", "description": "Runs a command."}
THOUGHT = "<think>Where?</think>"


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.submitted[-1].tokens, skip_special_tokens=False)


async def ask(app: Starlette, **fields: Any) -> asgi.Visit:
    return await asgi.Visit(PATH, {"model": "base", "input": "hi", **fields}).run(app)


async def answer(app: Starlette, **fields: Any) -> dict[str, Any]:
    visit = await ask(app, **fields)
    assert visit.status == 200, visit.chunks
    found: dict[str, Any] = json.loads(b"".join(visit.chunks))
    return found
