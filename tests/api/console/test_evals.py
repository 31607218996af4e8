"""The console's evaluations: one is started, watched, stopped and compared."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from planted_console import plant_run, planted_console
from playwright.sync_api import Page, Route, expect


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[str]:
    runs = tmp_path / "runs"
    for name in ("old", "new"):
        plant_run(runs, name, "sums")
    with planted_console(tmp_path / "data", FakeEngine(), runs) as url:
        yield f"{url}/#batches"


def test_an_evaluation_is_started_and_watched_until_it_is_stopped(page: Page, planted: str) -> None:
    asked: list[Any] = []
    played = 0
    running = False

    def runs(route: Route) -> None:
        """The list, with the run that was started before all others."""
        nonlocal running
        if route.request.method == "POST":
            asked.append(route.request.post_data_json)
            running = True
            route.fulfill(status=201, json={})
            return
        found = route.fetch().json()
        fresh = found["data"][0] | {"id": "fresh", "name": "a fresh one", "running": running}
        route.fulfill(json=found | {"data": [fresh] * bool(asked) + found["data"]})

    def report(route: Route) -> None:
        nonlocal played
        played += 1
        found = route.fetch(url=route.request.url.replace("fresh", "new")).json()
        far = {
            "id": "fresh",
            "running": running,
            "played": played,
            "plays": 9,
            "complete": False,
            "output": "the last line",
        }
        route.fulfill(json=found | far)

    def cancel(route: Route) -> None:
        nonlocal running
        running = False
        route.fulfill(json={})

    page.route("**/v1/eval_reports", runs)
    page.route("**/v1/eval_reports/fresh", report)
    page.route("**/v1/eval_reports/fresh/cancel", cancel)
    page.goto(planted)
    form = page.get_by_role("form", name="Start an evaluation")
    form.get_by_label("Suites").fill("demo, schemas")
    form.get_by_label("Cases of a task").fill("3")
    form.get_by_role("button", name="Start").click()
    progress = page.get_by_role("status").filter(has_text="of 9 cases")
    expect(progress).to_be_visible()
    expect(progress).not_to_contain_text("1 of 9 cases")  # it asks again by itself
    assert asked == [{"suites": ["demo", "schemas"], "models": [], "name": "", "count": 3}]
    page.get_by_role("button", name="Stop").click()
    expect(progress).to_be_hidden()
    expect(page.get_by_text("the last line")).to_be_visible()
    expect(page.get_by_role("button", name="Save the report")).to_be_visible()


def test_a_run_is_compared_with_another(page: Page, planted: str) -> None:
    page.goto(planted)
    page.get_by_text("sums").first.click()
    page.get_by_label("Compare with").first.select_option(index=1)
    table = page.get_by_role("region", name="Compared with")
    expect(table).to_contain_text("0 of 4")
    expect(table).to_contain_text("50.0")
