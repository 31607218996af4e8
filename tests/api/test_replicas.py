"""`/v1/replicas`: who may add and remove engines, and what is said to those who ask for what cannot be."""

from pathlib import Path
from typing import Any

import pytest
from uploads import open_fixture

from personae.actors.replicas.scaling import ReplicaInfo
from personae.api.app import create_app
from personae.api.options import Replicas, ServeOptions, checked
from personae.errors import Conflict, RequestError

pytestmark = pytest.mark.anyio


class FakeScaler:
    """Has as many engines as it was last asked for."""

    most = 4

    def __init__(self) -> None:
        self.count = 2
        self.drained: list[float] = []

    def list(self) -> list[ReplicaInfo]:
        return [ReplicaInfo(id, "ready", running=id, waiting=1, restarts=2) for id in range(self.count)]

    async def scale(self, count: int, drain_seconds: float) -> None:
        if not 1 <= count <= self.most:
            raise RequestError("too many", param="replicas")
        if count == 3:
            raise Conflict("no room yet", param="replicas")
        self.count = count
        self.drained.append(drain_seconds)


@pytest.fixture
def scaler() -> FakeScaler:
    return FakeScaler()


async def ask(tmp_path: Path, scaler: Any, method: str, body: Any = None, role: Any = "admin") -> Any:
    with open_fixture(tmp_path) as fixture:
        fixture.app = create_app(fixture.engine, tenants=fixture.tenants, scaler=scaler)
        fixture.key("root", "admin")
        async with fixture.client(fixture.key("ann", role)) as client:
            return await client.request(method, "/v1/replicas", json=body)


async def test_an_admin_lists_engines_and_has_another_number_of_them(tmp_path, scaler) -> None:
    listed = (await ask(tmp_path, scaler, "GET")).json()
    assert (listed["object"], listed["max_replicas"], len(listed["data"])) == ("list", 4, 2)
    assert listed["data"][1] == {
        "id": "1",
        "object": "replica",
        "status": "ready",
        "role": "both",
        "running": 1,
        "waiting": 1,
        "restarts": 2,
        "error": None,
    }
    scaled = await ask(tmp_path, scaler, "POST", {"replicas": 4, "drain_timeout": 2.5})
    assert (scaled.status_code, len(scaled.json()["data"])) == (200, 4)
    await ask(tmp_path, scaler, "POST", {"replicas": 1})
    assert scaler.drained == [2.5, 30.0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": 5}, "replicas"),
        ({"replicas": "2"}, "replicas"),
        ({"replicas": 2, "drain_timeout": -1}, "drain_timeout"),
        ({"replicas": 2, "drain_timeout": 1e9}, "drain_timeout"),
        ({"replicas": 2, "count": 2}, "count"),
        ({}, "replicas"),
    ],
)
async def test_a_body_that_is_wrong_is_refused_with_the_field_s_name(tmp_path, scaler, body, param) -> None:
    answer = await ask(tmp_path, scaler, "POST", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert scaler.count == 2


async def test_a_number_that_cannot_be_had_now_is_a_conflict(tmp_path, scaler) -> None:
    answer = await ask(tmp_path, scaler, "POST", {"replicas": 3})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_only_an_admin_s_key_may_ask(tmp_path, scaler, method: str) -> None:
    answer = await ask(tmp_path, scaler, method, {"replicas": 1} if method == "POST" else None, "tenant")
    assert answer.status_code == 403
    assert scaler.count == 2


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_server_with_one_engine_says_how_to_have_more(tmp_path, method: str) -> None:
    answer = await ask(tmp_path, None, method, {"replicas": 2} if method == "POST" else None)
    assert answer.status_code == 404
    assert "--replicas" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("given", "least", "most"), [(3, 3, 3), ("3", 3, 3), ("1:4", 1, 4), ("2:2", 2, 2), ("0:1", 0, 1)]
)
def test_a_number_of_engines_is_one_or_a_range(given: Any, least: int, most: int) -> None:
    found = checked(ServeOptions(replicas=given)).replicas
    assert (found.least, found.most, found.fixed) == (least, most, least == most)
    assert Replicas(str(found)) == found


@pytest.mark.parametrize("given", [0, -1, "0:0", "4:2", "1:", ":4", "1:2:3", "two", "1.5", "9" * 30, ""])
def test_what_is_no_number_of_engines_is_refused_by_the_options_name(given: Any) -> None:
    with pytest.raises(ValueError, match=r"`replicas`: .*(is not a number of engines|larger number first)"):
        checked(ServeOptions(replicas=given))
