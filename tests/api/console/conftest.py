"""A real Chromium, without a window. Tests that need one are skipped where there is none."""

import shutil
from collections.abc import Iterator

import pytest
from patience import PATIENCE
from playwright.sync_api import Browser, Page, expect, sync_playwright
from real_server import Running, running

from personae.api.bundled import NAMED
from personae.api.options import ServeOptions

expect.set_options(timeout=1000 * PATIENCE)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

FLAGS = ["--no-sandbox", "--disable-dev-shm-usage"]  # as root, and where /dev/shm is small


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For one module: Playwright keeps an event loop in this thread, where other tests have their own."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=1000 * PATIENCE)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page on which no script fails and nothing breaks the content security policy."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(1000 * PATIENCE)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if "Content Security" in said.text else None)
    yield page
    context.close()
    assert faults == []


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(ServeOptions(NAMED, device="cpu")) as server:
        yield server
