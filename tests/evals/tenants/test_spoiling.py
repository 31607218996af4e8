"""A hundred corrupted uploads against the app in process: each is refused, nothing is left behind."""

import asyncio
import random
from pathlib import Path

import pytest
from uploads import CONFIG, SHAPES, TENSORS, open_fixture, upload

from personae.evals.tenants.corruption import SPOILERS, Upload, is_whole, whole

GOOD = whole(*SHAPES.modules["q"])


def files(corrupted: Upload) -> dict[str, bytes]:
    return {CONFIG: corrupted.config, TENSORS: corrupted.tensors}


def test_every_way_to_spoil_an_upload_is_refused_with_a_reason(tmp_path: Path) -> None:
    async def stress() -> None:
        with open_fixture(tmp_path) as fixture:
            async with fixture.client() as client:
                assert (await upload(client, "x", files(GOOD))).status_code == 201
                await client.delete("/v1/adapters/x")
                for number in range(20):
                    for how, spoil in SPOILERS.items():
                        corrupted = spoil(random.Random(f"{number}"), GOOD)
                        answer = await upload(client, corrupted.name, files(corrupted), **corrupted.fields)
                        if answer.status_code == 201:
                            assert corrupted.judged, how
                            assert is_whole(corrupted, GOOD), how
                            await client.delete("/v1/adapters/x")
                        else:
                            assert 400 <= answer.status_code < 500, (how, number, answer.text)
                            assert answer.json()["error"]["message"]
            assert fixture.leftovers() == []

    asyncio.run(stress())


def test_another_reader_tells_a_whole_upload_from_others() -> None:
    assert is_whole(GOOD, GOOD)
    assert not is_whole(SPOILERS["not_finite"](random.Random(0), GOOD), GOOD)
    assert not is_whole(SPOILERS["odd_config"](random.Random(0), GOOD), GOOD)
    with pytest.raises(Exception, match="header"):
        is_whole(SPOILERS["lying_length"](random.Random(0), GOOD), GOOD)
