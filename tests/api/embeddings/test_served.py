"""Embeddings and scores over HTTP by the `openai` package and httpx; the truth is transformers with PEFT."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hf import hf_model
from openai import OpenAI
from patience import PATIENCE
from peft import PeftModel
from real_server import running
from tiny_adapters import make_adapter_folder
from tiny_models import model_folder

from personae.api.options import ServeOptions
from personae.engine.tokens import Tokenizer

TEXTS = ["The quick brown fox", "jumps", "over the lazy dog. " * 8]


@pytest.fixture(scope="module")
def base() -> Path:
    return model_folder("qwen3")


@pytest.fixture(scope="module")
def poet(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter_folder(tmp_path_factory.mktemp("adapters") / "poet", base, rank=4, seed=1)


@pytest.fixture(scope="module")
def url(base: Path, poet: Path) -> Iterator[str]:
    options = ServeOptions(
        base,
        adapters=(poet.parent,),
        device="cpu",
        dtype="float32",
        served_model_name="tiny",
        one_process=True,
    )
    with running(options) as server:
        yield server.url


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def truth(base: Path, poet: Path) -> dict[str, Any]:
    return {"tiny": hf_model(base), "poet": PeftModel.from_pretrained(hf_model(base), poet).eval()}


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> Tokenizer:
    return Tokenizer.load(base)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_batch([text], True, None, False, None)[0]


@torch.no_grad()
def states(model: Any, ids: list[int]) -> np.ndarray:
    """Hidden states behind the last norm, [tokens, H] float32."""
    found: np.ndarray = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].numpy()
    return found


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def asked(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/{path}", json=body, timeout=PATIENCE)


@pytest.mark.parametrize("model", ["tiny", "poet"])
def test_the_openai_package_gets_the_vectors_of_peft(
    model: str, client: OpenAI, truth: dict[str, Any], tokenizer: Tokenizer
) -> None:
    for kind in ("float", "base64", None):
        chosen = {} if kind is None else {"encoding_format": kind}
        answer = client.embeddings.create(model=model, input=TEXTS, **chosen)  # type: ignore[call-overload]
        assert [each.index for each in answer.data] == [0, 1, 2]
        assert answer.model == model
        tokens = [ids_of(tokenizer, text) for text in TEXTS]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
        for each, ids in zip(answer.data, tokens, strict=True):
            vector = each.embedding
            if isinstance(vector, str):
                vector = np.frombuffer(base64.b64decode(vector), "<f4")
            np.testing.assert_allclose(vector, unit(states(truth[model], ids)[-1]), rtol=1e-3, atol=1e-5)


def test_inputs_may_be_text_or_ids_and_dimensions_cut_and_the_pooling_is_chosen(
    url: str, truth: dict[str, Any], tokenizer: Tokenizer
) -> None:
    ids = ids_of(tokenizer, TEXTS[0])
    mean = states(truth["tiny"], ids).mean(0)
    for given in (TEXTS[0], [TEXTS[0]], ids, [ids]):
        answer = asked(url, "embeddings", input=given, pooling="mean", normalize=False).json()
        np.testing.assert_allclose(answer["data"][0]["embedding"], mean, rtol=1e-3, atol=1e-5)
        assert len(answer["data"]) == 1
    cut = asked(url, "embeddings", input=ids, pooling="mean", dimensions=5).json()["data"][0]["embedding"]
    np.testing.assert_allclose(cut, unit(mean[:5]), rtol=1e-3, atol=1e-5)
    last = asked(url, "embeddings", input=ids, truncate_prompt_tokens=2, truncation_side="right").json()
    found = last["data"][0]["embedding"]
    np.testing.assert_allclose(found, unit(states(truth["tiny"], ids[:2])[-1]), rtol=1e-3, atol=1e-5)


def test_more_inputs_than_sequences_are_computed_in_windows(url: str) -> None:
    inputs = [[4 + i % 50, 7, 9] for i in range(1100)]
    answer = asked(url, "embeddings", input=inputs, dimensions=2).json()
    assert [each["index"] for each in answer["data"]] == list(range(1100))
    vectors = [each["embedding"] for each in answer["data"]]
    np.testing.assert_allclose(vectors[0], vectors[1050], rtol=1e-3, atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == 3300


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"input": ""}, "input", "`input` is empty"),
        ({"input": []}, "input", "`input` is empty"),
        ({"input": ["a", ""]}, "input[1]", "`input[1]` is empty"),
        ({"input": ["a", 3]}, "input", "must be text, token ids"),
        ({"input": [10**6]}, "input[0]", "no token of this model"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": [5] * 5000}, "input", "maximum context length"),
        ({"input": "word " * 5000}, "input", "maximum context length"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a", "dimensions": 10**6}, "dimensions", "vectors have"),
        ({"input": "a", "pooling": "max"}, "pooling", "max"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "a", "model": "nobody"}, "model", "does not exist"),
        ({"input": "a", "priority": 99}, "priority", "priority"),
        ({"input": "a", "stream": True}, "stream", "stream"),
    ],
)
def test_bad_input_is_refused_by_its_field(url: str, body: dict[str, Any], param: str, said: str) -> None:
    response = asked(url, "embeddings", **body)
    error = response.json()["error"]
    assert response.status_code in (400, 404), error
    assert error["param"] == param
    assert said in error["message"]


@torch.no_grad()
def yes_of(model: Any, tokenizer: Tokenizer, prompt: list[int]) -> float:
    yes, no = (tokenizer.encode_batch([word], False, None, False, None)[0][0] for word in ("yes", "no"))
    logits = model(torch.tensor([prompt])).logits[0, -1]
    return float(torch.softmax(logits[[yes, no]].float(), 0)[0])


@pytest.mark.parametrize("model", ["tiny", "poet"])
def test_a_score_is_the_probability_of_yes_against_no(
    model: str, url: str, truth: dict[str, Any], tokenizer: Tokenizer
) -> None:
    documents = ["Paris is in France.", "Bread is baked.", "x"]
    answer = asked(url, "score", model=model, text_1="Where is Paris?", text_2=documents).json()
    assert answer["model"] == model
    for place, (each, document) in enumerate(zip(answer["data"], documents, strict=True)):
        text = (
            "<Instruct>: The document answers the query.\n<Query>: Where is Paris?\n<Document>: " + document
        )
        system = 'You judge whether a document meets an instruction for a query. Answer only "yes" or "no".'
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        shown = httpx.post(f"{url}/tokenize", json={"messages": messages}, timeout=PATIENCE).json()["tokens"]
        assert each["index"] == place
        assert each["score"] == pytest.approx(yes_of(truth[model], tokenizer, shown), abs=1e-4)


def test_documents_are_ranked_by_their_scores(url: str) -> None:
    documents = [f"document {number}" for number in range(6)]
    body = {"query": "which?", "documents": documents}
    scores = asked(url, "score", text_1="which?", text_2=documents).json()["data"]
    ranked = asked(url, "rerank", **body).json()["results"]
    order = sorted(range(6), key=lambda index: -scores[index]["score"])
    assert [each["index"] for each in ranked] == order
    assert [each["document"]["text"] for each in ranked] == [documents[index] for index in order]
    top = asked(url, "rerank", **body, top_n=2, return_documents=False).json()["results"]
    assert [each["index"] for each in top] == order[:2]
    assert all("document" not in each for each in top)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("rerank", {"query": "a", "documents": ["word " * 5000]}, "documents[0]"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1"),
        ("score", {"text_1": "a", "text_2": "b", "instruction": "x" * 5000}, "instruction"),
    ],
)
def test_bad_pairs_are_refused_by_their_field(url: str, path: str, body: dict[str, Any], param: str) -> None:
    response = asked(url, path, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
