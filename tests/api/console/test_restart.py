"""The engine dies while the console waits for an answer."""

import os
import re
import signal
import subprocess
from pathlib import Path

import httpx
from patience import PATIENCE, eventually
from planted_console import NamedAdapter, busy, planted_console
from playwright.sync_api import Page, expect
from programs import Program, child

LONG = "[a-z ]{600}"  # far from its end when its first tokens are noticed


def replacement(parent: int, killed: int) -> int:
    """The engine core that its supervisor has started after one was killed, held still."""
    children: list[int] = []

    def started() -> bool:
        listed = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False)
        children[:] = [int(found) for found in listed.stdout.split() if int(found) != killed]
        return len(children) == 1

    eventually(started, "another engine core starts")
    os.kill(children[0], signal.SIGSTOP)
    return children[0]


def generated(server: httpx.Client) -> float:
    """The tokens that a server has generated."""
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total{"))


def test_a_stream_goes_on_when_the_engine_is_killed_and_the_page_shows_it(page: Page) -> None:
    with Program("-m", "personae", "serve", "demo", "--port", "0", "--device", "cpu") as server:
        found = re.match(r"personae ready (\S+)", server.line())
        assert found is not None
        url, engine_core = found[1], child(server.process.pid)
        page.goto(url)
        page.get_by_label("Bound by").select_option("regex")
        page.get_by_role("textbox", name="Regular expression").fill(LONG)
        page.get_by_label("Most tokens").fill("700")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Message", exact=True).fill("Go on")
        page.get_by_role("button", name="Send").click()
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            # Not by the page, which may draw the beginning when the answer is complete.
            eventually(lambda: generated(client) >= 20, "the answer begins")
        os.kill(engine_core, signal.SIGKILL)
        started = replacement(server.process.pid, engine_core)
        paused = page.get_by_text("The engine restarts.")
        expect(paused).to_be_visible()  # however fast engine cores start here
        text = page.locator(".assistant .text")
        expect(text).to_have_text(re.compile(".{20}"))
        before = text.inner_text()
        os.kill(started, signal.SIGCONT)
        expect(page.locator(".summary")).to_contain_text("the engine restarted meanwhile")
        expect(paused).to_have_count(0)
        after = text.inner_text()
        assert re.fullmatch(LONG, after)
        assert after.startswith(before), "nothing is lost, nothing is said twice"
        page.get_by_role("button", name="Live").click()
        engine = page.get_by_label("Table of engines").locator("tbody td")
        expect(engine.nth(1)).to_have_text("ready")
        expect(engine.nth(4)).to_have_text("1")


def test_a_restart_is_drawn_among_the_steps(page: Page, tmp_path: Path) -> None:
    with planted_console(tmp_path, NamedAdapter(figures=busy("acme"))) as url:
        page.goto(f"{url}/#live")
        expect(page.get_by_label("Steps", exact=True)).to_contain_text("the engine restarted")
        expect(page.locator(".bar-restart")).to_have_attribute("d", re.compile(r"^M[\d.]+ 0v90$"))
