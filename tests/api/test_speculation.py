"""Speculation through the whole product: the same answers, fewer steps, and figures that say so."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cut_model import cut_model
from patience import PATIENCE
from real_server import Running, running
from tiny_heads import make_head_folder
from tiny_models import model_folder

from personae.actors.options import OWN_MTP
from personae.api.bundled import NAMED
from personae.api.options import ServeOptions
from personae.evals.demo.adapters import MODEL

TEXT = "The parcel is late. The parcel is late. The parcel is late. The parcel is late."
ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.8, "seed": 4, "presence_penalty": 0.6, "n": 2},
    {"stop": ["e p", "late. T"], "seed": 5},
    {"prediction": {"type": "content", "content": TEXT}},
    {"prediction": {"type": "content", "content": [{"type": "text", "text": TEXT}]}, "stop": ["zz", "is"]},
    {"response_format": {"type": "json_object"}, "seed": 6, "temperature": 1.0},
]


@pytest.fixture(scope="module")
def guessing() -> Iterator[Running]:
    with running(ServeOptions(NAMED, max_seqs=8, speculate="ngram")) as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    with running(ServeOptions(NAMED, max_seqs=8, speculate="off")) as server:
        yield server


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    small = cut_model(tmp_path_factory.mktemp("draft"), MODEL, 3)
    with running(ServeOptions(NAMED, max_seqs=8, speculate="draft", draft_model=small)) as server:
        yield server


@pytest.fixture(scope="module")
def heading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    head = make_head_folder(tmp_path_factory.mktemp("head"), MODEL, size=2000)
    with running(ServeOptions(NAMED, max_seqs=8, speculate="draft", draft_model=head)) as server:
        yield server


@pytest.fixture(scope="module")
def mimo() -> Iterator[tuple[Running, Running]]:
    """MiMo, which guesses with its own MTP layer, and which does not guess."""
    model, name = model_folder("mimo"), "personae-demo"
    with (
        running(
            ServeOptions(model, served_model_name=name, max_seqs=8, speculate="draft", draft_model=OWN_MTP)
        ) as guessing,
        running(ServeOptions(model, served_model_name=name, max_seqs=8, speculate="off")) as plain,
    ):
        yield guessing, plain


def ask(server: Running, **fields: Any) -> dict[str, Any]:
    body = {
        "model": "personae-demo",
        "messages": [{"role": "user", "content": f"Say it again: {TEXT}"}],
        "max_tokens": 60,
        "temperature": 0.0,
        **fields,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]  # JSON


def metric(server: Running, name: str, label: str = "") -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text.splitlines()
    named = [line for line in lines if line.startswith((f"{name}_total{{", f"{name}{{")) and label in line]
    return sum(float(line.split()[-1]) for line in named)


@pytest.mark.parametrize("fields", ASKED, ids=str)
def test_an_answer_is_the_same_with_guesses_and_without(
    guessing: Running, plain: Running, fields: dict[str, Any]
) -> None:
    with_guesses, without = ask(guessing, **fields), ask(plain, **fields)
    assert [each["message"] for each in with_guesses["choices"]] == [
        each["message"] for each in without["choices"]
    ]
    assert [each["finish_reason"] for each in with_guesses["choices"]] == [
        each["finish_reason"] for each in without["choices"]
    ]
    assert with_guesses["usage"]["completion_tokens"] == without["usage"]["completion_tokens"]


@pytest.mark.parametrize("fields", ASKED[:4], ids=str)
def test_an_answer_is_the_same_with_a_draft_model(
    drafting: Running, plain: Running, fields: dict[str, Any]
) -> None:
    with_model, without = ask(drafting, **fields), ask(plain, **fields)
    assert [each["message"] for each in with_model["choices"]] == [
        each["message"] for each in without["choices"]
    ]


@pytest.mark.parametrize("fields", ASKED, ids=str)
def test_an_answer_is_the_same_with_a_trained_head(
    heading: Running, plain: Running, fields: dict[str, Any]
) -> None:
    with_head, without = ask(heading, **fields), ask(plain, **fields)
    assert [each["message"] for each in with_head["choices"]] == [
        each["message"] for each in without["choices"]
    ]


@pytest.mark.parametrize("fields", ASKED, ids=str)
def test_an_answer_is_the_same_with_the_models_own_mtp_layer(
    mimo: tuple[Running, Running], fields: dict[str, Any]
) -> None:
    guessing, plain = mimo
    before = metric(guessing, "personae:draft_tokens", 'source="head"')
    with_layer, without = ask(guessing, **fields), ask(plain, **fields)
    assert [each["message"] for each in with_layer["choices"]] == [
        each["message"] for each in without["choices"]
    ]
    assert metric(guessing, "personae:draft_tokens", 'source="head"') > before


def test_metrics_say_who_made_the_drafts(drafting: Running, heading: Running, guessing: Running) -> None:
    sources = (drafting, "model"), (heading, "head"), (guessing, "ngram"), (guessing, "tenant")
    for server, source in sources:
        ask(server)
        ask(server)
        drafts = metric(server, "personae:draft_tokens", f'source="{source}"')
        accepted = metric(server, "personae:accepted_draft_tokens", f'source="{source}"')
        assert 0 <= accepted <= drafts
        assert drafts > 0, source


def test_metrics_count_drafts_and_those_that_were_right(guessing: Running, plain: Running) -> None:
    ask(guessing)
    ask(plain)
    drafts = metric(guessing, "vllm:spec_decode_num_draft_tokens")
    accepted = metric(guessing, "vllm:spec_decode_num_accepted_tokens")
    assert 0 < accepted <= drafts
    assert metric(guessing, "vllm:spec_decode_num_accepted_tokens_per_pos") == accepted
    assert 0 < metric(guessing, "vllm:spec_decode_num_drafts") <= drafts
    assert metric(plain, "vllm:spec_decode_num_draft_tokens") == 0


def test_a_request_may_do_without(guessing: Running) -> None:
    before = metric(guessing, "vllm:spec_decode_num_draft_tokens")
    ask(guessing, speculate=False, prediction={"type": "content", "content": TEXT})
    assert metric(guessing, "vllm:spec_decode_num_draft_tokens") == before


def test_usage_says_how_much_of_a_prediction_was_right(guessing: Running, plain: Running) -> None:
    said = ask(plain)
    text = said["choices"][0]["message"]["content"]
    details = ask(guessing, prediction={"type": "content", "content": text})["usage"][
        "completion_tokens_details"
    ]
    assert details["accepted_prediction_tokens"] > said["usage"]["completion_tokens"] // 2
    assert details["rejected_prediction_tokens"] >= 0
    assert "accepted_prediction_tokens" not in said["usage"]["completion_tokens_details"]


@pytest.mark.parametrize(
    "prediction",
    ["text", {"type": "other", "content": "x"}, {"type": "content"}, {"type": "content", "content": 1}],
)
def test_a_prediction_of_another_shape_is_refused_by_name(guessing: Running, prediction: Any) -> None:
    body = {
        "model": "personae-demo",
        "messages": [{"role": "user", "content": "?"}],
        "prediction": prediction,
    }
    answer = httpx.post(f"{guessing.url}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("prediction")
