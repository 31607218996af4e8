"""Whatever people and models name things stays text in the console, in every place where it is shown."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from planted_console import NamedAdapter, busy, plant_run, planted_console
from playwright.sync_api import Page, expect

PAYLOAD = (
    '<img src=x onerror="window.broken=true"> "><svg onload=window.broken=true> '
    "</textarea></option><script>window.broken=true</script> javascript:window.broken=true "
    "{{constructor.constructor('window.broken=true')()}} ${window.broken=true}"
)
INJECTED = "#app img, #app script, #app iframe, #app svg[onload], #app [onerror], #app [onload]"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("hostile")
    plant_run(folder / "runs", "one", PAYLOAD)
    engine = NamedAdapter(answer=PAYLOAD, figures=busy(PAYLOAD))
    engine.name, engine.max_model_len = PAYLOAD, 8192
    with planted_console(folder / "data", engine, folder / "runs") as url:
        yield url


@pytest.fixture
def page(page: Page) -> Iterator[Page]:
    """On which no payload has run when the test is over."""
    yield page
    assert page.locator(INJECTED).count() == 0
    assert page.evaluate("window.broken") is None


def test_the_name_of_an_adapter(page: Page, hostile: str) -> None:
    page.goto(hostile)
    page.get_by_label("Model of column 1").select_option(PAYLOAD)
    page.get_by_role("button", name="Adapters").click()
    expect(page.get_by_role("listitem").filter(has_text=PAYLOAD)).to_be_visible()
    page.get_by_role("button", name="Live").click()
    expect(page.get_by_role("cell", name=PAYLOAD)).to_have_count(2)


def test_an_answer_with_and_without_the_chances_of_its_tokens(page: Page, hostile: str) -> None:
    page.goto(hostile)
    for turn, chances in enumerate((False, True)):
        page.get_by_label("Token probabilities").set_checked(chances)
        page.get_by_label("Message", exact=True).fill(PAYLOAD)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".assistant .summary")).to_have_count(turn + 1)
    expect(page.locator(".assistant .text").first).to_have_text(PAYLOAD)
    expect(page.locator(".user .text").first).to_have_text(PAYLOAD)
    spelled = page.locator(".token").all_inner_texts()
    assert "".join(spelled) == PAYLOAD
    page.locator(".token").first.hover()
    expect(page.locator(".chances code").first).to_have_text("<")


def test_the_label_of_a_tenant(page: Page, hostile: str) -> None:
    page.goto(f"{hostile}/#live")
    expect(page.get_by_label("Table of tenants and adapters").locator("td").first).to_have_text(PAYLOAD)
    page.get_by_role("button", name="Tenants").click()
    page.get_by_label("Name of a new tenant").fill(PAYLOAD)
    page.get_by_role("button", name="Add a tenant").click()
    expect(page.get_by_role("alert")).to_contain_text("name")


def test_the_name_of_a_batch_its_metadata_and_its_results(page: Page, hostile: str, tmp_path: Path) -> None:
    body = {"model": "base", "messages": [{"role": "user", "content": PAYLOAD}]}
    line = {"custom_id": PAYLOAD, "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps(line))
    page.goto(f"{hostile}/#batches")
    page.get_by_label("Name of the batch").fill(PAYLOAD)
    page.get_by_label("File of requests").set_input_files(file)
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("heading", name=PAYLOAD)).to_be_visible()
    page.get_by_role("button", name="Show results").click()
    expect(page.get_by_role("cell", name=PAYLOAD)).to_have_count(2)


def test_a_report_of_an_evaluation_and_its_page_is_only_ever_saved(page: Page, hostile: str) -> None:
    page.goto(f"{hostile}/#batches")
    page.get_by_label("Evaluations").locator("summary").first.click()
    expect(page.get_by_role("cell", name=PAYLOAD)).to_be_visible()
    page.get_by_text("2 failed").click()
    page.locator("details.struct details.struct summary").first.click()
    expect(page.locator("pre").first).to_have_text(PAYLOAD)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save the report").click()
    assert download.value.suggested_filename == "one.html"
    assert "<script>" in download.value.path().read_text()
    assert page.url.startswith(hostile)
