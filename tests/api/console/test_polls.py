"""What the console asks for by itself: little, and nothing in a tab that nobody looks at."""

from collections.abc import Iterator

import pytest
from planted_console import NamedAdapter, busy, planted_console
from playwright.sync_api import Page, expect

HIDE = "Object.defineProperty(document, 'hidden', {get: () => window.away === true})"
MOVE = "document.dispatchEvent(new Event('visibilitychange'))"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with planted_console(tmp_path_factory.mktemp("polls"), NamedAdapter(figures=busy("acme"))) as url:
        yield url


@pytest.fixture
def asked(page: Page) -> list[str]:
    """The paths that the page asks for from now on. Its clock stands still."""
    found: list[str] = []
    page.on("request", lambda request: found.append(request.url.partition("/v1/")[2]))
    page.clock.install()
    return found


def test_live_asks_every_two_seconds_and_nothing_while_the_tab_is_hidden(
    page: Page, planted: str, asked: list[str]
) -> None:
    page.add_init_script(HIDE)
    page.goto(f"{planted}/#live")
    expect(page.get_by_label("Table of engines")).to_be_visible()
    for _ in range(3):
        with page.expect_request("**/v1/stats"):
            page.clock.run_for(2000)
        page.wait_for_load_state("networkidle")
    page.evaluate("window.away = true")
    asked.clear()
    page.clock.run_for(60_000)
    assert asked == []
    with page.expect_request("**/v1/stats"):
        page.evaluate(f"window.away = false; {MOVE}")


def test_the_tabs_that_are_not_shown_ask_nothing(page: Page, planted: str, asked: list[str]) -> None:
    page.goto(f"{planted}/#playground")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.wait_for_load_state("networkidle")
    asked.clear()
    page.clock.run_for(60_000)
    assert asked == []
    page.get_by_role("button", name="Batches and evals").click()
    expect(page.get_by_text("No batches yet.")).to_be_visible()
    page.wait_for_load_state("networkidle")
    asked.clear()
    for _ in range(10):
        page.clock.run_for(3000)
        page.wait_for_load_state("networkidle")
    assert 1 <= len(asked) <= 3, "while no batch runs it asks every fifteen seconds"
