"""What a tenant and a request say of their turn reaches the engine; what is out of range is refused."""

from pathlib import Path

import pytest
from uploads import open_fixture
from virtual_clock import real_clock

pytestmark = real_clock
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def bound(name: str) -> dict[str, object]:
    schema = {**SCHEMA, "title": name}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


async def test_priority_and_weight_are_the_logs(tmp_path: Path) -> None:
    with open_fixture(tmp_path) as fixture:
        async with fixture.client(fixture.key("ann", weight=2.5)) as client:
            body = {"model": "base", "prompt": "hi"}
            assert (await client.post("/v1/completions", json={**body, "priority": -3})).status_code == 200
            chat = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "priority": 16}
            assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
            assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert [(log.priority, log.weight) for log in fixture.engine.submitted] == [
        (-3, 2.5),
        (16, 2.5),
        (0, 2.5),
    ]


@pytest.mark.parametrize("priority", [17, -17, 1.5, "high"])
async def test_a_priority_out_of_range_is_refused(tmp_path: Path, priority: object) -> None:
    with open_fixture(tmp_path) as fixture:
        async with fixture.client() as client:
            body = {"model": "base", "prompt": "hi", "priority": priority}
            response = await client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")


async def test_new_schemas_are_limited_and_known_ones_are_not(tmp_path: Path) -> None:
    with open_fixture(tmp_path) as fixture:
        async with fixture.client(fixture.key("ann", schemas_per_minute=2)) as client:
            codes = [
                (
                    await client.post(
                        "/v1/completions",
                        json={"model": "base", "prompt": "hi", "response_format": bound(name)},
                    )
                ).status_code
                for name in ("one", "two", "one", "three", "two")
            ]
    assert codes == [200, 200, 200, 429, 200]
