"""Forced text through the whole product, by the bundled model."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from patience import PATIENCE
from real_server import Running, running

from personae.api.bundled import NAMED
from personae.api.options import ServeOptions

LONG = "No refund is given for a parcel that was opened, used, worn or washed."
CHOICES = {"choice": [LONG, "Yes, there is a refund."]}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(ServeOptions(NAMED, max_seqs=8)) as server:
        yield server


def streamed(server: Running, **fields: Any) -> tuple[str, list[int], int, str]:
    """The text, how many tokens came in each event, what the usage says, and why it ended."""
    asked = {"model": "personae-demo", "prompt": "No", "add_special_tokens": False}
    no = httpx.post(f"{server.url}/tokenize", json=asked, timeout=PATIENCE)
    body = {
        "model": "personae-demo",
        "messages": [{"role": "user", "content": "May I have a refund?"}],
        "structured_outputs": CHOICES,
        "logit_bias": {str(no.json()["tokens"][0]): 100},
        "max_tokens": 500,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **fields,
    }
    text, counts, used, finish = "", [], 0, ""
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("usage"):
                used = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                counts.append(len(choice.get("token_ids") or ()))
                finish = choice["finish_reason"] or finish
    return text, counts, used, finish


def test_forced_text_comes_in_one_event_and_is_counted(server: Running) -> None:
    text, counts, used, finish = streamed(server)
    assert (text, finish) == (LONG, "stop")
    assert sum(counts) == used
    assert max(counts) > 20


def test_a_request_may_leave_every_token_to_the_model(server: Running) -> None:
    text, counts, used, finish = streamed(server, jump_forward=False)
    assert (text, finish) == (LONG, "stop")
    assert sum(counts) == used
    assert max(counts) < 20, "a slow reader may be given several at once"


def test_a_stop_string_within_forced_text_ends_the_answer_there(server: Running) -> None:
    text, _, _, finish = streamed(server, stop="worn")
    assert (text, finish) == (LONG.partition("worn")[0], "stop")
