"""An activated adapter: the API finds its invocation in the prompt; without one the base answers."""

from pathlib import Path

from safetensors.torch import save
from uploads import CONFIG, TENSORS, config, open_fixture, tensors, upload
from virtual_clock import real_clock

pytestmark = real_clock


async def test_it_is_active_from_the_last_invocation_on_and_absent_without_one(tmp_path: Path) -> None:
    files = {CONFIG: config(alora_invocation_tokens=[7, 8]), TENSORS: save(tensors())}
    with open_fixture(tmp_path) as fixture:
        async with fixture.client() as client:
            record = (await upload(client, "judge", files)).json()
            assert (record["traits"], record["invocation"]) == (["activated LoRA"], [7, 8])
            for prompt in ([1, 7, 8, 2, 7, 8, 3], [7, 8], [1, 2, 7]):
                body = {"model": "judge", "prompt": prompt, "max_tokens": 2}
                assert (await client.post("/v1/completions", json=body)).json()["model"] == "judge"
    found = [(log.adapter == record["sha256"], log.adapter_start) for log in fixture.engine.submitted]
    assert found == [(True, 4), (True, 0), (False, 0)]
