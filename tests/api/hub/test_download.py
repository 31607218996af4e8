"""Downloads from a server that speaks the Hub's API, by `huggingface_hub` itself, in processes of their own:
it reads its environment once."""

import json
from pathlib import Path

import httpx
import pytest
from fake_hub import SECOND, FakeHub, folder_files
from patience import PATIENCE
from programs import Program
from tiny_adapters import make_adapter_folder
from tiny_models import model_folder

FETCH = """
import json, logging, sys
from pathlib import Path
from personae.api.hub import download, files, names
from personae.errors import LoadError
logging.basicConfig(level="INFO", format="%(message)s")
download._SECONDS_BETWEEN_LINES = 0.0
choose = files.adapter_files if sys.argv[1] == "adapter" else files.model_files
try:
    folder, chosen = download.fetched(names.hub_name(Path(sys.argv[2])), choose)
    print(json.dumps({name: (folder / name).read_bytes().decode("latin-1") for name in chosen}))
except LoadError as error:
    print(json.dumps(error.message))
"""
MODEL = {"config.json": b"{}", "model.safetensors": bytes(300_000), "tokenizer.json": b"[1]"}
ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}


def fetch(name: str, kind: str = "model") -> tuple[dict[str, bytes] | str, str]:
    """The files that came, or the refusal; and what was logged."""
    with Program("-c", FETCH, kind, name) as program:
        answer = json.loads(program.end(0))
        if isinstance(answer, dict):
            answer = {name: text.encode("latin-1") for name, text in answer.items()}
        return answer, program.errors


def test_a_model_comes_without_what_could_run(hub: FakeHub) -> None:
    hub.add("org/model", MODEL | {"modeling_evil.py": b"raise SystemExit", "pytorch_model.bin": b"pickle"})
    files, said = fetch("org/model")
    assert files == MODEL
    assert set(hub.paths("GET", "HEAD")) == set(MODEL)
    assert "downloading org/model: " in said
    assert f"org/model is at commit {'1' * 40}" in said


def test_a_revision_is_pinned_and_a_cached_commit_needs_no_network(hub: FakeHub) -> None:
    hub.add("org/lora", ADAPTER)
    hub.add("org/lora", ADAPTER | {"adapter_model.safetensors": b"newer"}, SECOND, "v2")
    assert fetch("org/lora", "adapter")[0] == ADAPTER
    assert fetch("org/lora@v2", "adapter")[0]["adapter_model.safetensors"] == b"newer"
    assert fetch(f"org/lora@{SECOND}", "adapter")[0]["adapter_model.safetensors"] == b"newer"
    asked = len(hub.asked)
    fetch(f"org/lora@{SECOND}", "adapter")
    assert hub.asked[asked:] == []
    assert fetch("org/lora@v3", "adapter")[0] == "org/lora has no branch, tag or commit 'v3'."


def test_a_download_that_breaks_off_goes_on_where_it_stopped(hub: FakeHub) -> None:
    chunk = 10 * 2**20  # what the library writes at once
    weights = bytes(range(256)) * 4096 * 12
    hub.add("org/model", MODEL | {"model.safetensors": weights})
    hub.cuts["model.safetensors"] = [chunk + 1000]
    assert fetch("org/model")[0]["model.safetensors"] == weights
    asked = [each for method, path, each in hub.asked if method == "GET" and "model.safetensors" in path]
    assert asked == [None, f"bytes={chunk}-"]


def test_a_second_try_downloads_only_what_is_missing(hub: FakeHub) -> None:
    hub.add("org/model", MODEL)
    hub.cuts["model.safetensors"] = [1000] + [0] * 20
    refused, _ = fetch("org/model")
    assert "does not answer" in refused
    assert "Try again with a network: complete files stay there" in refused
    hub.cuts.clear()
    hub.asked.clear()
    assert fetch("org/model")[0] == MODEL
    assert set(hub.paths("GET")) == {"model.safetensors"}


def test_offline_the_cache_serves_what_is_complete_in_it(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/model", MODEL)
    hub.add("org/other", MODEL)
    fetch("org/model")
    asked = len(hub.asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch("org/model")[0] == MODEL
    refused, _ = fetch("org/other")
    assert refused.startswith("HF_HUB_OFFLINE is set, and org/other is not complete in the cache at ")
    assert hub.asked[asked:] == []


def test_without_a_network_the_cache_serves_and_what_is_missing_is_one_sentence(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/model", MODEL)
    fetch("org/model")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch("org/model")[0] == MODEL
    refused, _ = fetch("org/other")
    assert refused.startswith("The Hub at http://127.0.0.1:9 does not answer (")
    assert "org/other is not complete in the cache" in refused


@pytest.mark.parametrize(
    ("locked", "said"),
    [
        (
            None,
            "There is no repository org/model at {hub}, and no such file or folder here. If it is private, ",
        ),
        ((401, "GatedRepo"), "org/model is gated: ask for access at {hub}/org/model, then log in with "),
        ((403, "GatedRepo"), "org/model is gated: ask for access at {hub}/org/model, then log in with "),
        ((403, "Other"), "{hub} refused org/model with status 403."),
        ((404, "RepoNotFound"), "There is no repository org/model at {hub}"),
    ],
)
def test_why_the_hub_refuses_is_one_sentence(locked: tuple[int, str] | None, said: str, hub: FakeHub) -> None:
    if locked is not None:
        hub.add("org/model", MODEL).locked = locked
    refused, _ = fetch("org/model")
    assert refused.startswith(said.format(hub=hub.url))
    assert "\n" not in refused


def test_a_model_and_an_adapter_are_served_by_their_names(hub: FakeHub, tmp_path: Path) -> None:
    base = model_folder("qwen3")
    hub.add("org/tiny", folder_files(base))
    hub.add("org/poet", folder_files(make_adapter_folder(tmp_path / "poet", base, rank=4, seed=1)))
    names = (
        "--adapters",
        "poet=org/poet",
        "--adapters",
        "org/poet@main",
        "--adapters",
        f"own={tmp_path / 'poet'}",
    )
    small = ("--device", "cpu", "--dtype", "float32", "--port", "0")
    with Program("-m", "personae", "serve", "org/tiny", *names, *small) as program:
        url = program.line().split()[2]
        models = httpx.get(f"{url}/v1/models", timeout=PATIENCE).json()["data"]
        assert [each["id"] for each in models] == ["org/tiny", "poet", "org/poet", "own"]
        texts = {}
        for name in ("org/tiny", "poet", "org/poet", "own"):
            body = {"model": name, "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
            texts[name] = answer.json()["choices"][0]["text"]
    assert texts["poet"] == texts["org/poet"] == texts["own"] != texts["org/tiny"]


def test_a_name_that_the_hub_does_not_have_is_one_line_and_exit_code_2(hub: FakeHub) -> None:
    with Program("-m", "personae", "serve", "org/none", "--port", "0") as program:
        assert program.end(2) == ""
        assert program.errors.splitlines()[-1].startswith("error: There is no repository org/none at http")
        assert "Traceback" not in program.errors
