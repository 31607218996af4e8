"""`personae serve` with several models: real engines in processes of their own, one of them at a time."""

from pathlib import Path

import httpx
import pytest
from patience import PATIENCE
from served_program import Served
from tiny_adapters import make_adapter_folder
from tiny_models import model_folder
from uploads import CONFIG, TENSORS

from personae.api.base_models import open as opening
from personae.api.base_models.measure import PROCESS_BYTES, Measured
from personae.api.options import ServeOptions
from personae.errors import LoadError

SMALL = ("--kv-memory", "16MiB", "--adapter-memory", "1MiB", "--max-model-len", "128")


def states(server: Served) -> dict[str, str]:
    return {each["id"]: each["state"] for each in server.get("/v1/models").json()["data"]}


def test_two_models_and_their_adapters_take_turns_in_the_memory_of_one(tmp_path: Path) -> None:
    first, other = model_folder("qwen3"), model_folder("llama")
    adapter = make_adapter_folder(tmp_path / "adapter", other, rank=4)
    room = f"{(PROCESS_BYTES * 3 // 2) >> 20}MiB"
    with Served("--model", f"a={first}", "--model", f"b={other}", "--models-memory", room, *SMALL) as server:
        assert server.model == "a", server.errors
        assert states(server) == {"a": "running", "b": "asleep"}
        files = {name: (name, (adapter / name).read_bytes()) for name in (CONFIG, TENSORS)}
        form = {"name": "poet", "base_model": "b"}
        made = httpx.post(f"{server.url}/v1/adapters", data=form, files=files, timeout=PATIENCE)
        assert made.status_code == 201, made.text
        for name, running in (("poet", "b"), ("a", "a")):
            answer = server.complete(model=name, max_tokens=4)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
            found = states(server)
            assert found.pop("poet") == found["b"]
            assert {base for base, state in found.items() if state == "running"} == {running}


@pytest.mark.anyio
async def test_a_model_that_never_fits_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(engines: list[object]) -> list[Measured]:
        return [Measured(2**20, 128) for _ in engines]

    monkeypatch.setattr(opening, "measured", measured)
    options = ServeOptions(models=(f"a={model_folder('qwen3')}",), models_memory=2**19)
    with pytest.raises(LoadError, match=r"`a` needs 1MiB.* may have 512KiB .*--models-memory"):
        async with opening.open_base_models(options):
            pass
