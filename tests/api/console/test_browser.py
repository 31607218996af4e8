"""The console in a real Chromium, over a real engine: what a person does first."""

import json
import re
from pathlib import Path

import httpx
import pytest
from live_server import serving
from patience import PATIENCE
from playwright.sync_api import Page, expect
from real_server import Running
from uploads import open_fixture

from personae.api.app import create_app
from personae.api.bundled import DEMO
from personae.api.tenants.usage import UsageLedger

HOSTILE = '<img src=x onerror="window.broken = true"><script>window.broken = true</script>'


def open_console(page: Page, server: Running, path: str = "/") -> None:
    page.goto(f"{server.url}{path}")
    expect(page.get_by_role("heading", name="Personae")).to_be_visible()


def test_a_chat_streams_into_two_columns(page: Page, server: Running) -> None:
    open_console(page, server)
    page.get_by_label("Token probabilities").check()
    page.get_by_role("button", name="Compare").click()
    page.get_by_label("Model of column 2").select_option("verse")
    page.get_by_label("Message", exact=True).fill("Hello!")
    page.keyboard.press("Enter")
    for column in ("Column 1", "Column 2"):
        one = page.get_by_label(column)
        expect(one.locator(".summary")).to_contain_text("prompt tokens")
        assert one.locator(".token").count() > 1
    page.locator(".token").nth(1).hover()
    expect(page.locator(".chances")).to_contain_text("%")
    page.get_by_label("Tokens with probabilities").first.press("ArrowRight")
    expect(page.locator(".chances caption")).to_be_visible()


def test_what_a_person_or_a_model_writes_stays_text(page: Page, server: Running) -> None:
    open_console(page, server)
    page.get_by_label("Model of column 1").select_option("verse")
    page.get_by_label("Bound by").select_option("choice")
    page.get_by_role("textbox", name="One of these lines").fill(HOSTILE)
    page.get_by_label("Message", exact=True).fill(HOSTILE)
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".assistant .text")).to_have_text(HOSTILE)
    expect(page.locator(".user .text")).to_have_text(HOSTILE)
    assert page.locator(".talk img, .talk script").count() == 0
    assert page.evaluate("window.broken") is None


def test_a_schema_is_refused_and_the_keyword_is_shown(page: Page, server: Running) -> None:
    open_console(page, server)
    page.get_by_label("Bound by").select_option("schema")
    editor = page.get_by_label("JSON Schema", exact=True)
    editor.fill('{"type": ')
    expect(page.get_by_role("alert")).to_contain_text("not JSON")
    editor.fill(
        json.dumps(
            {"type": "array", "items": {"type": "string", "pattern": r"^(abcdefgh)\1$"}, "minItems": 1}
        )
    )
    verdict = page.locator(".verdict")
    expect(verdict).to_contain_text("The server refuses this.")
    expect(verdict.locator("tr.refused")).to_contain_text("#/items/pattern")
    page.get_by_label("Strict").uncheck()
    expect(verdict).to_contain_text("The server would serve this.")
    expect(verdict.locator("tr.checked")).to_contain_text("#/items/pattern")


def test_a_bound_answer_is_as_the_schema_says(page: Page, server: Running) -> None:
    open_console(page, server)
    page.get_by_label("Bound by").select_option("schema")
    page.get_by_label("JSON Schema", exact=True).fill('{"enum": ["red", "blue"]}')
    page.get_by_label("Message", exact=True).fill("Which colour?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".assistant .text")).to_have_text(re.compile('^"(red|blue)"$'))


def test_programs_that_send_the_request_can_be_copied(page: Page, server: Running) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_console(page, server)
    page.get_by_label("Temperature").fill("0")
    for name, said in (("Copy as curl", "curl http"), ("Python", "OpenAI("), ("JavaScript", "new OpenAI(")):
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert said in copied
        assert server.url in copied
        if name == "Python":
            compile(copied, "copied", "exec")
            assert "temperature=0" in copied
        expect(page.get_by_role("button", name=name, exact=True)).to_be_visible()


def test_an_adapter_is_uploaded_used_and_deleted(page: Page, server: Running, tmp_path: Path) -> None:
    source = DEMO / "adapters" / "verse"
    open_console(page, server)
    page.get_by_role("button", name="Adapters").click()
    page.get_by_role("textbox", name="Name").fill("mine")
    files = page.get_by_label("Files of the adapter")
    broken = tmp_path / "adapter_model.safetensors"
    broken.write_bytes(b"no tensors")
    files.set_input_files([source / "adapter_config.json", broken])
    page.get_by_role("button", name="Upload").click()
    expect(page.get_by_role("alert")).to_contain_text("safetensors")
    files.set_input_files([source / "adapter_config.json", source / "adapter_model.safetensors"])
    page.get_by_role("button", name="Upload").click()
    expect(page.get_by_text("mine was uploaded and checked")).to_be_visible()
    expect(files).to_have_value("")
    page.get_by_role("button", name="Playground").click()
    page.get_by_label("Model of column 1").select_option("mine")
    page.get_by_label("Message", exact=True).fill("Hello!")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".summary")).to_contain_text("prompt tokens")
    page.get_by_role("button", name="Adapters").click()
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("mine was deleted.")).to_be_visible()


def test_an_admin_makes_tenants_and_keys_and_the_page_then_asks_for_one(page: Page, tmp_path: Path) -> None:
    with open_fixture(tmp_path) as fixture:
        ledger = UsageLedger(fixture.data)
        app = create_app(fixture.engine, tenants=fixture.tenants, registry=fixture.registry, usage=ledger)
        with serving(app) as address:
            page.goto(f"{address}/#tenants")
            page.on("dialog", lambda dialog: dialog.accept())
            page.get_by_label("Name of a new tenant").fill("ann")
            page.get_by_role("button", name="Add a tenant").click()
            page.get_by_label("Label of a new key of ann").fill(HOSTILE)
            page.get_by_role("button", name="Make a key").click()
            expect(page.get_by_role("alert")).to_contain_text("first key must be an admin's")
            page.get_by_label("Role of a new key of ann").select_option("admin")
            page.get_by_role("button", name="Make a key").click()
            secret = page.locator(".secret pre").inner_text()
            page.reload()
            expect(page.get_by_role("alert")).to_have_count(0)
            page.get_by_label("Key").fill(secret)
            page.get_by_role("button", name="Use it").click()
            expect(page.get_by_role("cell", name=HOSTILE)).to_be_visible()
            page.get_by_text("Limits", exact=True).click()
            page.get_by_label("concurrent").fill("7")
            page.get_by_role("button", name="Save limits").click()
            expect(page.get_by_text("Limits (1 set)")).to_be_visible()
            assert fixture.tenants.find_tenant("ann").limits.concurrent == 7
            assert page.evaluate("window.broken") is None


def test_live_shows_what_the_metrics_say(page: Page, server: Running) -> None:
    open_console(page, server, "/#live")
    expect(page.locator("dl")).to_contain_text("yes")
    assert page.locator(".chart").count() == 6
    expect(page.get_by_label("Table of engines")).to_contain_text("ready")
    body = {"model": "verse", "prompt": "hi", "max_tokens": 30, "ignore_eos": True}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
    for _ in range(2):  # the server may have collected the first of them before the answer
        with page.expect_response("**/v1/stats"):
            pass
    expect(page.locator(".chart", has_text="First token")).to_contain_text(re.compile(r"median \d"))
    expect(page.get_by_label("Table of tenants and adapters")).to_contain_text("verse")
    bars = page.get_by_role("group", name="steps")
    bars.press("ArrowLeft")
    expect(page.locator(".of-step")).to_contain_text("1 row, 1 token")
    page.get_by_text("As a table").click()
    expect(page.get_by_label("Steps", exact=True).get_by_role("cell", name="ms").first).to_be_visible()


def test_a_batch_runs_and_its_results_are_shown(page: Page, server: Running, tmp_path: Path) -> None:
    body = {"model": "verse", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    line = {"custom_id": HOSTILE, "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps(line))
    open_console(page, server, "/#batches")
    page.get_by_label("File of requests").set_input_files(file)
    page.get_by_role("button", name="Run").click()
    page.get_by_role("button", name="Show results").click()
    expect(page.get_by_role("cell", name="200")).to_be_visible()
    expect(page.get_by_role("cell", name=HOSTILE)).to_be_visible()


def test_docs_describe_every_route(page: Page, server: Running) -> None:
    open_console(page, server, "/docs")
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    expect(page.locator(".operation")).to_have_count(sum(map(len, paths.values())))
    shown = page.locator(".operation summary code").all_inner_texts()
    assert set(shown) == set(paths)
    page.get_by_text("/v1/messages", exact=True).click()
    expect(page.get_by_text("MessagesRequest").first).to_be_visible()
    page.get_by_label("Find").fill("tokenize")
    expect(page.locator(".operation")).to_have_count(2)


def test_a_request_is_tried_beside_its_description(page: Page, server: Running) -> None:
    open_console(page, server, "/docs")
    summaries = page.locator(".operation summary")
    chat = summaries.filter(has=page.get_by_text("/v1/chat/completions", exact=True))
    chat.click()
    form = page.get_by_role("form", name="Try post /v1/chat/completions")
    field = form.get_by_label("Body to send")
    expect(field).to_have_value(re.compile(next(iter(server.client.models("default")))))
    body = json.loads(field.input_value()) | {"max_tokens": 2}
    field.fill(json.dumps(body))
    form.get_by_role("button", name="Send").click()
    answer = page.locator(".operation[open]")
    expect(answer.get_by_role("status")).to_have_text("200")
    expect(answer.locator("pre").last).to_contain_text('"object": "chat.completion"')
    field.fill("{")
    form.get_by_role("button", name="Send").click()
    expect(answer.get_by_role("status")).to_have_text("400")
    chat.click()
    summaries.filter(has=page.get_by_text("/v1/adapters/{name}/versions", exact=True)).click()
    form = page.get_by_role("form", name="Try get /v1/adapters/{name}/versions")
    expect(form.get_by_role("button", name="Send")).to_be_disabled()
    form.get_by_label("name").fill("no/body")
    form.get_by_role("button", name="Send").click()
    expect(page.locator(".operation[open] [role=status]")).to_have_text("404")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(scheme: str, page: Page, server: Running) -> None:
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page.set_viewport_size({"width": 360, "height": 740})
    open_console(page, server)
    for tab in ("Playground", "Live", "Adapters", "Tenants", "Batches and evals", "API"):
        button = page.get_by_role("button", name=tab, exact=True)
        button.click()
        expect(button).to_have_attribute("aria-current", "page")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab


def test_every_control_has_a_name(page: Page, server: Running) -> None:
    open_console(page, server)
    for tab in ("Playground", "Live", "Adapters", "Tenants", "Batches and evals", "API"):
        button = page.get_by_role("button", name=tab, exact=True)
        button.click()
        expect(button).to_have_attribute("aria-current", "page")
        controls = page.locator("button:visible, input:visible, select:visible, textarea:visible")
        named = "c.getAttribute('aria-label') || c.innerText || c.labels?.[0]?.innerText"
        assert controls.evaluate_all(f"all => all.filter(c => !({named})).map(c => c.outerHTML)") == []
