"""`/v1/eval_reports`: evaluations that a server runs of itself, on the bundled model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fake_engine import FakeEngine
from live_server import serving
from patience import PATIENCE, eventually
from planted_console import plant_run

from personae.api.app import create_app
from personae.api.eval_reports.statistics import paired
from personae.api.settings import ApiSettings
from personae.evals.harness.records import RESULTS, OutcomeRecord
from personae.evals.served import Served

RUNS = "/v1/eval_reports"
SMALL = {"suites": ["demo"], "tasks": ["triage"], "models": ["base"], "modes": ["free"], "count": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "runs"  # the first run makes it


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    arguments = ["demo", "--device", "cpu", "--eval-reports", str(folder)]
    with (
        Served(arguments, folder.parent / "server.log") as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        yield client


def start(client: httpx.Client, **asked: Any) -> dict[str, Any]:
    answer = client.post(RUNS, json=SMALL | asked)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_an_evaluation_is_started_and_watched_until_it_is_complete(client: httpx.Client) -> None:
    begun = start(client, name="mine")
    assert (begun["running"], begun["name"], begun["suites"]) == (True, "mine", ["demo"])
    eventually(lambda: not client.get(f"{RUNS}/{begun['id']}").json()["running"], "it ends")
    report = client.get(f"{RUNS}/{begun['id']}").json()
    assert (report["complete"], report["page"], report["output"]) == (True, True, None)
    assert report["played"] == report["plays"] == sum(row["judged"] for row in report["rows"]) == 2
    [listed] = client.get(RUNS).json()["data"]
    assert (listed["name"], listed["running"]) == ("mine", False)


def test_one_runs_at_a_time_and_one_that_is_stopped_keeps_what_it_has_played(client: httpx.Client) -> None:
    id = start(client, count=200, concurrency=1)["id"]
    refused = client.post(RUNS, json=SMALL)
    assert refused.status_code == 409
    assert id in refused.json()["error"]["message"]
    eventually(lambda: client.get(f"{RUNS}/{id}").json()["played"] > 0, "a case was played")
    stopped = client.post(f"{RUNS}/{id}/cancel")
    assert stopped.status_code == 200, stopped.text
    report = stopped.json()
    assert (report["running"], report["complete"]) == (False, False)
    assert 0 < report["played"] < report["plays"]
    assert client.post(f"{RUNS}/{id}/cancel").status_code == 404


def test_one_that_does_not_begin_is_refused_with_its_own_words_and_leaves_nothing(
    client: httpx.Client, folder: Path
) -> None:
    known = sorted(folder.iterdir())
    answer = client.post(RUNS, json=SMALL | {"models": ["nobody"]})
    assert answer.status_code == 400, answer.text
    assert "nobody" in answer.json()["error"]["message"]
    assert sorted(folder.iterdir()) == known


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suites", ["--out=/tmp/elsewhere"]),
        ("suites", ["demo"] * 65),
        ("models", [""]),
        ("models", ["a\nb"]),
        ("name", "x" * 201),
        ("count", 0),
        ("concurrency", 65),
        ("temperature", 3),
        ("url", "http://elsewhere"),
    ],
)
def test_bad_requests_are_refused_with_the_name_of_the_field(
    client: httpx.Client, field: str, value: object
) -> None:
    answer = client.post(RUNS, json=SMALL | {field: value})
    assert answer.status_code == 400, answer.text
    assert field in json.dumps(answer.json()["error"])


def test_two_runs_are_compared_on_the_cases_that_both_have_judged(tmp_path: Path) -> None:
    for name, text in (("one", "a text"), ("two", "a text"), ("other", "another text")):
        plant_run(tmp_path, name, text)
    changed = [
        OutcomeRecord(suite="demo", task="a text", case=case, model="base", mode="free", **verdict)
        for case, verdict in (("1", {"passed": True}), ("3", {"passed": True}), ("2", {"error": "none"}))
    ]
    with (tmp_path / "one" / RESULTS).open("ab") as file:
        file.write(b"".join(msgspec.json.encode(each) + b"\n" for each in changed))
    with serving(create_app(FakeEngine(), ApiSettings(eval_reports=tmp_path))) as url:
        [row] = httpx.get(f"{url}{RUNS}/one/against/two").json()["rows"]
        assert (row["of"], row["gained"], row["lost"]) == (3, 2, 0)
        assert (row["before"], row["after"], row["change"]) == pytest.approx((1 / 3, 1.0, 2 / 3))
        assert row["interval"] == pytest.approx([paired(2, 0, 3).low, paired(2, 0, 3).high])
        answer = httpx.get(f"{url}{RUNS}/one/against/other")
        assert answer.status_code == 400
        assert "no case in common" in answer.json()["error"]["message"]
        assert httpx.get(f"{url}{RUNS}/one/against/three").status_code == 404
        assert httpx.post(f"{url}{RUNS}", json=SMALL).status_code == 503  # it takes none
