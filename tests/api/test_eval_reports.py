"""`/v1/eval_reports`: what `personae eval` wrote, read-only and bounded."""

import os
from pathlib import Path
from typing import Any

import asgi
import msgspec
import pytest
from fake_engine import FakeEngine
from planted_console import plant_run

from personae.api.app import create_app
from personae.api.eval_reports import reader
from personae.api.settings import ApiSettings
from personae.evals.harness.records import OutcomeRecord, read_run
from personae.evals.report.tables import tables

pytestmark = pytest.mark.anyio


async def get(folder: Path | None, path: str = "") -> Any:
    app = create_app(FakeEngine(), ApiSettings(eval_reports=folder))
    async with asgi.client(app) as client:
        return await client.get(f"/v1/eval_reports{path}")


async def test_a_server_that_was_told_of_no_folder_says_how_to_tell_it() -> None:
    answer = await get(None)
    assert answer.status_code == 404
    assert "--eval-reports" in answer.json()["error"]["message"]


async def test_runs_are_listed_the_newest_first_and_other_things_are_left_out(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old")):
        plant_run(tmp_path, name, f"the {name} one")
        os.utime(tmp_path / name / "results.jsonl", (1e9 - age, 1e9 - age))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.jsonl").write_text('{"some": "thing"}\n')
    found = (await get(tmp_path)).json()["data"]
    assert [(each["id"], each["name"], each["page"]) for each in found] == [
        ("new", "the new one", True),
        ("old", "the old one", True),
    ]


async def test_a_folder_that_no_run_has_made_so_far_has_no_runs(tmp_path: Path) -> None:
    assert (await get(tmp_path / "runs")).json()["data"] == []


async def test_the_tables_of_a_run_say_what_its_report_says(tmp_path: Path) -> None:
    plant_run(tmp_path, "run", "a text")
    again = OutcomeRecord(suite="demo", task="a text", case="1", model="base", mode="free", passed=True)
    broken = OutcomeRecord(
        suite="demo", task="a text", case="9", model="base", mode="free", error="no answer"
    )
    with (tmp_path / "run" / "results.jsonl").open("ab") as file:
        file.write(b"".join(msgspec.json.encode(one) + b"\n" for one in (again, broken)))
        file.write(b'{"type": "case", "suite": "not fin')
    found = (await get(tmp_path, "/run")).json()
    ((key, (cell,)),) = tables([read_run(tmp_path / "run")])[0].rows.items()
    [row] = found["rows"]
    assert (row["task"], row["model"], row["mode"]) == key
    assert (row["passed"], row["judged"], row["errors"]) == (3, 4, 1)
    assert row["interval"] == pytest.approx([cell.passed.low, cell.passed.high])
    assert row["scores"] == {"valid": 0.5}
    assert row["seconds"] == cell.seconds
    assert [one["case"] for one in found["failures"]] == ["3", "9"]
    assert found["failures"][1]["error"] == "no answer"
    assert (found["complete"], found["seconds"]) == (True, 1.5)


async def test_nothing_outside_of_the_folder_is_read(tmp_path: Path) -> None:
    plant_run(tmp_path / "secret", "run", "hidden words")
    reports = tmp_path / "reports"
    reports.mkdir()
    (reports / "link").symlink_to(tmp_path / "secret" / "run")
    (reports / "half").mkdir()
    (reports / "half" / "results.jsonl").symlink_to(tmp_path / "secret" / "run" / "results.jsonl")
    plant_run(reports, "own", "own")
    (reports / "own" / "report.html").unlink()
    (reports / "own" / "report.html").symlink_to(tmp_path / "secret" / "run" / "report.html")
    assert [each["id"] for each in (await get(reports)).json()["data"]] == ["own"]
    for path in ("/link", "/half", "/..%2fsecret%2frun", "/%2e%2e", "/own/page", "/link/page"):
        answer = await get(reports, path)
        assert answer.status_code == 404, path
        assert "hidden words" not in answer.text


async def test_a_large_run_is_refused_and_long_texts_and_many_failures_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_run(tmp_path, "run", "x" * 10_000)
    monkeypatch.setattr(reader, "MOST_FAILURES", 1)
    found = (await get(tmp_path, "/run")).json()
    assert (len(found["failures"]), found["failed"]) == (1, 2)
    assert len(found["failures"][0]["prompt"]) == reader.MOST_TEXT + 1
    monkeypatch.setattr(reader, "MOST_BYTES", 100)
    answer = await get(tmp_path, "/run")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "id")


async def test_the_page_of_a_run_is_a_file_to_keep_and_never_a_page_of_the_server(tmp_path: Path) -> None:
    plant_run(tmp_path, "run", "a text")
    answer = await get(tmp_path, "/run/page")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''run.html"
    assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert answer.headers["x-content-type-options"] == "nosniff"
