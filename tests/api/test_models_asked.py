"""Which model answers: the one that is named, by any of its names, or the default."""

from pathlib import Path
from typing import Any

import asgi
import pytest
from fake_engine import FakeEngine
from starlette.applications import Starlette
from tiny_models import model_folder

from personae.actors.assembly import assemble
from personae.actors.options import EngineOptions
from personae.api.app import create_app
from personae.api.settings import ApiSettings
from personae.errors import LoadError

pytestmark = pytest.mark.anyio
ASKED: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
}


async def answered(app: Starlette, path: str, **fields: Any) -> Any:
    async with asgi.client(app) as client:
        return await client.post(f"/v1/{path}", json={**ASKED[path], **fields})


@pytest.mark.parametrize("path", ASKED)
async def test_without_a_model_the_base_answers(path: str, app: Starlette, engine: FakeEngine) -> None:
    for fields in ({}, {"model": None}):
        response = await answered(app, path, **fields)
        assert (response.status_code, response.json()["model"]) == (200, "base")
        assert engine.submitted[-1].adapter is None


@pytest.mark.parametrize("path", ASKED)
async def test_without_a_model_the_default_model_answers(path: str, engine: FakeEngine) -> None:
    app = create_app(engine, ApiSettings(default_model="team/pirate"))
    response = await answered(app, path)
    assert (response.status_code, response.json()["model"]) == (200, "team/pirate")
    assert engine.submitted[-1].adapter == "d" * 64
    assert (await answered(app, path, model="base")).json()["model"] == "base"
    assert engine.submitted[-1].adapter is None


async def test_a_default_model_that_does_not_exist_is_a_404_that_names_it(engine: FakeEngine) -> None:
    app = create_app(engine, ApiSettings(default_model="nobody"))
    response = await answered(app, "completions")
    assert response.status_code == 404
    assert "`nobody`" in response.json()["error"]["message"]


async def test_the_base_has_several_names() -> None:
    app = create_app(engine := FakeEngine(base_names=("base", "gpt-4o")))
    for name in ("base", "gpt-4o"):
        response = await answered(app, "chat/completions", model=name)
        assert (response.status_code, response.json()["model"]) == (200, name)
    assert {log.adapter for log in engine.submitted} == {None}
    async with asgi.client(app) as client:
        models = (await client.get("/v1/models")).json()["data"]
        metrics = (await client.get("/metrics")).text
    assert [model["id"] for model in models] == ["base", "gpt-4o", "team/pirate"]
    assert [model["root"] for model in models] == ["base", "base", "base"]
    assert 'vllm:prompt_tokens_total{model_name="base"}' in metrics
    assert "gpt-4o" not in metrics


def test_an_engine_is_opened_under_several_names(tmp_path: Path) -> None:
    folder = model_folder("qwen3")
    assembly = assemble(EngineOptions(folder, device="cpu", served_model_name=("a", "b", "a")))
    cards = assembly.engine_spec.models
    assert list(cards) == ["a", "b"]
    assert {card.adapter for card in cards.values()} == {None}
    with pytest.raises(LoadError, match="--served-model-name is empty"):
        assemble(EngineOptions(folder, device="cpu", served_model_name=("a", "")))


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("bse", "base"), ("Base", "base"), ("team/pirat", "team/pirate"), ("nobody", None), ("x" * 5000, None)],
)
async def test_a_misspelled_model_is_told_which_was_probably_meant(
    asked: str, meant: str | None, app: Starlette
) -> None:
    response = await answered(app, "completions", model=asked)
    assert response.status_code == 404
    hint = "; /v1/models lists those that do." if meant is None else f". Did you mean `{meant}`?"
    assert response.json()["error"]["message"] == f"The model `{asked[:100]}` does not exist{hint}"
