"""A stream of responses tells what the whole would, in the order in which the model wrote it."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine
from openai import OpenAI
from openai.types.responses import Response
from responses_asked import SHELL, THOUGHT, WEATHER, ask
from starlette.applications import Starlette
from tool_chat import call

from personae.api.choices import Part
from personae.api.exchange import Exchange
from personae.api.responses.answers import ItemDone
from personae.api.responses.builder import ResponseBuilder
from personae.api.responses.request import ResponsesRequest
from personae.api.responses.routes import admit
from personae.api.wire.decode import decode

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("burst", [1, 3, 400])
def test_a_stream_tells_the_same_as_the_whole(client: OpenAI, engine: FakeEngine, burst: int) -> None:
    engine.burst = burst
    engine.answer = THOUGHT + "I look." + call("get_weather", city="Köln") + call("shell", input="ls -l\n")
    asked: Any = {
        "model": "base",
        "input": "Weather?",
        "tools": [WEATHER, SHELL],
        "reasoning": {"effort": "low"},
    }
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.completed"
    assert bare(last.response) == bare(whole)
    assert json.loads(whole.output[2].arguments) == {"city": "Köln"}  # type: ignore[union-attr]  # it is a call
    assert whole.output[3].input == "ls -l\n"  # type: ignore[union-attr]  # of the custom tool
    for place, item in enumerate(whole.output):
        mine = [event for event in events if getattr(event, "output_index", None) == place]
        kinds = [event.type.removeprefix("response.") for event in mine]
        assert (kinds[0], kinds[-1]) == ("output_item.added", "output_item.done")
        deltas = "".join(event.delta for event in mine if event.type.endswith(".delta"))  # type: ignore[union-attr]
        assert deltas in json.loads(json.dumps(list(texts(item))))


ROME, BONN = (call("get_weather", city=city) for city in ("Rome", "Bonn"))


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        ("I look." + ROME + "And there." + BONN, ["message", "function_call"] * 2),
        (ROME + "I looked.", ["function_call", "message"]),
        (THOUGHT + ROME + BONN + "Both.", ["reasoning", "function_call", "function_call", "message"]),
        (call("shell", input="ls") + "Then." + ROME[:-20], ["custom_tool_call", "message"]),
    ],
    ids=["between", "after", "thought", "broken"],
)
async def test_the_items_do_not_depend_on_how_the_answer_comes(
    app: Starlette, engine: FakeEngine, said: str, kinds: list[str]
) -> None:
    """In the order in which the model wrote them, however its parts were merged on their way."""
    engine.answer = said
    fields = {"model": "base", "input": "Weather?", "tools": [WEATHER, SHELL], "top_logprobs": 1}
    asked = fields | {"include": ["message.output_text.logprobs"]}
    body = decode(json.dumps(asked).encode(), ResponsesRequest, 64)
    job, _ = await admit(Exchange(app.state.services), body)
    parts: list[Part] = []
    await job.run(parts.append)
    found = []
    for seed in range(40):
        cuts = random.Random(seed)
        left, merged = copy.deepcopy(parts), []
        while left:
            part = left.pop(0)
            while left and cuts.random() < seed / 40:
                part.add(left.pop(0))
            merged.append(part)
        form = ResponseBuilder(job, body)
        events: list[Any] = [event for part in merged for event in form.of(part)]
        events += form.last()
        items = events[-1].response.output
        done = [event.item for event in events if isinstance(event, ItemDone)]
        assert done == items
        found.append([bare_item(item) for item in items])
    assert [item["type"] for item in found[0]][: len(kinds)] == kinds
    assert all(items == found[0] for items in found)


def bare_item(item: Any) -> Any:
    return {name: value for name, value in msgspec.to_builtins(item).items() if name != "id"}


def texts(item: Any) -> Iterator[str]:
    """What an item says, whichever kind it is."""
    for part in getattr(item, "content", None) or ():
        yield part.text
    for name in ("arguments", "input"):
        if (text := getattr(item, name, None)) is not None:
            yield text


def bare(response: Response) -> Any:
    """Without what differs from answer to answer."""
    left_out = {"id", "call_id", "created_at", "completed_at"}

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: strip(inner) for name, inner in value.items() if name not in left_out}
        return [strip(inner) for inner in value] if isinstance(value, list) else value

    found = strip(response.model_dump())
    found["usage"].pop("input_tokens_details")
    return found


async def test_every_event_has_its_name(app: Starlette) -> None:
    visit = await ask(app, stream=True)
    for event in b"".join(visit.chunks).decode().strip().split("\n\n"):
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
