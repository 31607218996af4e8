"""What the console asks for by itself: little, and nothing in a tab that nobody looks at."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from fake_engine import FakeEngine
from live_server import serving
from patience import eventually
from planted_console import NamedAdapter, busy, planted_console
from playwright.sync_api import Page, expect

from personae.api.app import create_app
from personae.api.console.live import history_sample

HIDE = "Object.defineProperty(document, 'hidden', {get: () => window.away === true})"
MOVE = "document.dispatchEvent(new Event('visibilitychange'))"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with planted_console(tmp_path_factory.mktemp("polls"), NamedAdapter(figures=busy("acme"))) as url:
        yield url


@pytest.fixture
def asked(page: Page) -> list[str]:
    """The paths of the API that the page asks for from now on."""
    found: list[str] = []
    page.on("request", lambda request: "/v1/" in request.url and found.append(request.url))
    page.clock.install()
    return found


def load(page: Page, url: str) -> None:
    """Until it has what it asks for at its start. Its clock then stands still."""
    with page.expect_response("**/v1/models"), page.expect_response("**/v1/adapters?tenant=*"):
        page.goto(url)
    page.clock.pause_at(datetime.now(UTC) + timedelta(hours=1))


def drawn(page: Page, text: str) -> bool:
    """Whether the page shows it. It draws by timers, so its clock goes on a little first."""
    page.clock.run_for(100)
    return page.get_by_text(text).is_visible()


def test_live_asks_every_two_seconds_and_nothing_while_the_tab_is_hidden(
    page: Page, planted: str, asked: list[str]
) -> None:
    page.add_init_script(HIDE)
    load(page, f"{planted}/#live")
    expect(page.get_by_label("Table of engines")).to_be_visible()
    page.wait_for_load_state("networkidle")
    asked.clear()
    passed = 0  # milliseconds of its clock
    while len(asked) < 3:
        page.clock.run_for(500)
        passed += 500
    assert len(asked) <= 1 + passed / 2000
    page.evaluate("window.away = true")
    page.clock.run_for(4000)  # what was due before
    page.wait_for_load_state("networkidle")
    asked.clear()
    page.clock.run_for(60_000)
    assert asked == []
    with page.expect_request("**/v1/stats"):
        page.evaluate(f"window.away = false; {MOVE}")


def test_the_tabs_that_are_not_shown_ask_nothing(page: Page, planted: str, asked: list[str]) -> None:
    load(page, f"{planted}/#playground")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.wait_for_load_state("networkidle")
    asked.clear()
    page.clock.run_for(60_000)
    assert asked == []
    page.get_by_role("button", name="Batches and evals").click()
    eventually(lambda: drawn(page, "No batches yet."), "the list of batches")
    page.wait_for_load_state("networkidle")
    asked.clear()
    for _ in range(10):
        page.clock.run_for(3000)
        page.wait_for_load_state("networkidle")
    assert 1 <= len(asked) <= 3, "while no batch runs it asks every fifteen seconds"


def test_live_has_the_last_hour_when_it_is_opened(page: Page) -> None:
    app = create_app(FakeEngine())
    with serving(app) as url:
        services = app.state.services
        for _ in range(4):
            services.history.add(history_sample(services))
        page.goto(f"{url}/#live")
        expect(page.get_by_label("Charts show")).to_have_value("hour")
        chart = page.get_by_role("img", name="Sequences,")
        expect(chart).to_have_accessible_name(re.compile(r"^Sequences, 4 values, the latest: running 0, "))
        page.get_by_label("Charts show").select_option("now")
        expect(chart).to_have_accessible_name(re.compile(r"^Sequences, [1-3] values,"))
