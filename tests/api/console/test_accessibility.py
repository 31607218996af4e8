"""No serious fault of accessibility, by axe-core, on any tab: light, dark, and on a phone."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from planted_console import NamedAdapter, busy, plant_run, planted_console
from playwright.sync_api import Page, expect
from real_server import Running

ROOT = Path(__file__).resolve().parents[3]
AXE = ROOT / "tests" / "clients" / "node" / "node_modules" / "axe-core" / "axe.min.js"
SCREENS = {"desktop": (1280, 900), "phone": (360, 740)}
TABS = ("playground", "live", "adapters", "tenants", "batches", "docs")
on_screens = pytest.mark.parametrize("screen", SCREENS)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    if not AXE.exists():
        assert os.environ.get("PERSONAE_CLIENTS") != "required", "CI must have axe-core"
        pytest.skip("axe-core is not installed: make clients")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("planted")
    plant_run(folder / "runs", "before", "Sum up two numbers")
    engine = NamedAdapter(figures=busy("acme"))
    with planted_console(folder / "data", engine, folder / "runs") as url:
        yield url


def faults(page: Page) -> list[tuple[Any, ...]]:
    """Serious and critical ones: the rule, where, and why."""
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert found["passes"], "it has looked at something"
    return [
        (one["id"], node["target"], node["failureSummary"])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


def faults_light_and_dark(page: Page) -> list[tuple[Any, ...]]:
    """Those of the page as it is now. Colors are a matter of its style sheet alone."""
    found: list[tuple[Any, ...]] = []
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        found += [(scheme, *fault) for fault in faults(page)]
    return found


def resize(page: Page, screen: str) -> None:
    width, height = SCREENS[screen]
    page.set_viewport_size({"width": width, "height": height})


def test_axe_sees_a_fault_that_is_planted(page: Page, planted: str) -> None:
    page.goto(planted)
    page.get_by_role("button", name="Send").wait_for()
    page.evaluate(
        "document.querySelector('textarea').parentElement.replaceWith(document.createElement('select'))"
    )
    assert [rule for rule, *_ in faults(page)] == ["select-name"]


def test_axe_sees_a_fault_of_the_dark_page_alone(page: Page, planted: str) -> None:
    page.goto(planted)
    page.get_by_role("button", name="Send").wait_for()
    dull = "button { color: #444 !important; background: #333 !important }"
    rule = f"@media (prefers-color-scheme: dark) {{ {dull} }}"
    page.evaluate(
        "rule => document.styleSheets[0].insertRule(rule, document.styleSheets[0].cssRules.length)", rule
    )
    assert {fault[:2] for fault in faults_light_and_dark(page)} == {("dark", "color-contrast")}


@on_screens
@pytest.mark.parametrize("tab", TABS)
def test_every_tab(tab: str, screen: str, page: Page, planted: str, tmp_path: Path) -> None:
    resize(page, screen)
    page.goto(f"{planted}/#{tab}")
    SHOWN[tab](page, tmp_path)
    assert faults_light_and_dark(page) == []


@on_screens
def test_an_answer_with_chances_and_a_refused_schema(screen: str, page: Page, server: Running) -> None:
    resize(page, screen)
    page.goto(server.url)
    page.get_by_label("Token probabilities").check()
    page.get_by_role("button", name="Compare").click()
    page.get_by_label("Most tokens").fill("24")
    page.get_by_label("Message", exact=True).fill("Hello!")
    page.keyboard.press("Enter")
    expect(page.locator(".summary")).to_have_count(2)
    page.get_by_label("Bound by").select_option("schema")
    schema = {"type": "string", "title": "Twice", "pattern": r"^(abcdefgh)\1$"}
    page.get_by_label("JSON Schema", exact=True).fill(json.dumps(schema))
    expect(page.locator("tr.refused")).to_be_visible()
    page.get_by_label("Strict").uncheck()
    expect(page.locator("tr.checked")).to_be_visible()
    page.get_by_label("Tokens with probabilities").first.press("ArrowRight")
    expect(page.locator(".chances")).to_be_visible()
    assert faults_light_and_dark(page) == []


def _playground(page: Page, _: Path) -> None:
    page.get_by_role("button", name="Compare").click()
    page.get_by_label("Message", exact=True).fill("Hello!")
    page.keyboard.press("Enter")
    expect(page.locator(".summary")).to_have_count(2)


def _live(page: Page, _: Path) -> None:
    page.get_by_role("group", name="steps").press("ArrowLeft")
    page.get_by_text("As a table").click()
    expect(page.get_by_role("cell", name="acme")).to_be_visible()


def _adapters(page: Page, _: Path) -> None:
    site = page.url.partition("#")[0]
    assert page.request.post(f"{site}v1/completions", data={"model": "poet", "prompt": "hi"}).ok
    page.reload()
    poet = page.get_by_role("listitem").filter(has_text="poet")
    expect(poet.get_by_text("Used by 1 tenant")).to_be_visible()
    expect(poet.get_by_role("cell", name="default")).to_be_visible()


def _tenants(page: Page, _: Path) -> None:
    name = f"tenant-{os.urandom(4).hex()}"
    page.get_by_label("Name of a new tenant").fill(name)
    page.get_by_role("button", name="Add a tenant").click()
    made = page.get_by_role("article", name=name)  # until then, a page with one tenant shows that one
    made.get_by_text("Limits", exact=True).click()
    expect(made.get_by_role("button", name="Save limits")).to_be_visible()


def _batches(page: Page, folder: Path) -> None:
    body = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (folder / "requests.jsonl").write_text(json.dumps(line))
    page.get_by_label("Name of the batch").fill("nightly")
    page.get_by_label("File of requests").set_input_files(folder / "requests.jsonl")
    page.get_by_role("button", name="Run").click()
    page.get_by_role("button", name="Show results").first.click()
    expect(page.get_by_role("cell", name="200").first).to_be_visible()
    page.get_by_label("Evaluations").locator("summary").first.click()
    page.get_by_text("2 failed").click()
    page.locator("details.struct details.struct summary").first.click()


def _docs(page: Page, _: Path) -> None:
    page.get_by_text("/v1/messages", exact=True).click()
    page.get_by_text("MessagesRequest").first.click()


SHOWN = {
    "playground": _playground,
    "live": _live,
    "adapters": _adapters,
    "tenants": _tenants,
    "batches": _batches,
    "docs": _docs,
}
