"""The console's tab Tenants: a table of many for admins, and a tenant's own view."""

import csv
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from live_server import serving
from playwright.sync_api import Page, expect
from uploads import UploadFixture, open_fixture

from personae.api.app import create_app
from personae.api.tenants.store import Identity, TenantLimits
from personae.api.tenants.usage import UsageLedger

COUNT = 120


@contextmanager
def opened(path: Path) -> Iterator[tuple[str, UploadFixture, dict[str, str]]]:
    with open_fixture(path) as fixture:
        names = [f"tenant-{number:03d}" for number in range(COUNT)]
        fixture.tenants.create_many([(name, TenantLimits()) for name in names], keys=False)
        fixture.tenants.set_limits("tenant-007", {"concurrent": 3})
        keys = {"root": fixture.key("root", "admin"), "tenant-007": fixture.key("tenant-007")}
        ledger = UsageLedger(fixture.data)
        for number, name in enumerate(names):
            ledger.add(Identity(name, "tenant", key=f"k{number}"), "poet@1", number, 0, 1, 0.5, number / 10)
        ledger.add(Identity("tenant-007", "tenant", key="other"), None, 40, 0, 2)
        stores = {"tenants": fixture.tenants, "registry": fixture.registry, "usage": ledger}
        with serving(create_app(fixture.engine, **stores)) as url:
            yield url, fixture, keys


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, UploadFixture, dict[str, str]]]:
    with opened(tmp_path) as site:
        yield site


def enter(page: Page, url: str, key: str) -> None:
    page.goto(f"{url}/#tenants")
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Use it").click()


def test_an_admin_finds_sorts_and_turns_pages_of_many_tenants(
    page: Page, site: tuple[str, UploadFixture, dict[str, str]]
) -> None:
    url, fixture, keys = site
    enter(page, url, keys["root"])
    rows = page.get_by_label("Table of tenants").locator("tbody tr")
    expect(rows).to_have_count(50)
    expect(page.get_by_text(f"{COUNT + 1} tenants")).to_be_visible()
    expect(rows.first).to_contain_text("root")
    page.get_by_role("button", name="Later").click()
    page.get_by_role("button", name="Later").click()
    expect(page.get_by_text("Page 3 of 3")).to_be_visible()
    expect(rows).to_have_count(COUNT + 1 - 100)
    page.get_by_role("button", name="Spend").click()
    page.get_by_label("Find by name").fill("TENANT-1")
    expect(rows).to_have_count(20)
    assert rows.first.locator("td").all_inner_texts()[:4] == ["tenant-119", "1", "120", "11.90"]
    expect(page.get_by_role("columnheader", name="Spend")).to_have_attribute("aria-sort", "descending")

    page.get_by_label("Find by name").fill("tenant-007")
    page.get_by_role("button", name="tenant-007").click()
    card = page.get_by_role("article", name="tenant-007")
    chart = card.get_by_role("img", name="Tokens a day")
    expect(chart).to_have_attribute("aria-label", re.compile("latest: written 3, prompts 47$"))
    base = "written 2, prompts 40"
    for part, latest in (("poet", "written 1, prompts 7"), ("other", base), ("the base", base)):
        card.get_by_label("Charts show").select_option(part)
        expect(chart).to_have_attribute("aria-label", re.compile(f"latest: {latest}$"))
    card.get_by_label("Charts show").select_option("k7")
    with page.expect_download() as found:
        card.get_by_text("By adapter and key").click()
        card.get_by_role("button", name="Download as CSV").click()
    card.get_by_text("By adapter and key").click()
    with Path(found.value.path()).open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["key"], line["adapter"], line["prompt_tokens"]) for line in lines] == [("k7", "poet", "7")]
    card.get_by_text("By adapter and key").click()
    expect(card.get_by_label("Usage by Key")).to_contain_text("k7")
    card.get_by_text("Limits (1 set)").click()
    card.get_by_label("spend per day").fill("2.5")
    card.get_by_role("button", name="Save limits").click()
    expect(card.get_by_text("Limits (2 set)")).to_be_visible()
    assert fixture.tenants.find_tenant("tenant-007").limits.spend_per_day == 2.5


@pytest.mark.parametrize("width", [1400, 390])
def test_a_tenant_sees_its_limits_and_usage_and_no_form_of_admins(
    page: Page, site: tuple[str, UploadFixture, dict[str, str]], width: int
) -> None:
    url, _, keys = site
    page.set_viewport_size({"width": width, "height": 900})
    refused: list[str] = []
    page.on("response", lambda answer: refused.append(answer.url) if answer.status == 403 else None)
    enter(page, url, keys["tenant-007"])
    card = page.get_by_role("article", name="tenant-007")
    expect(card).to_contain_text("Today 50 tokens")
    expect(card.locator("dl")).to_contain_text("concurrent")
    card.get_by_text("By adapter and key").click()
    expect(card.get_by_label("Usage by Adapter")).to_contain_text("poet")
    expect(page.get_by_role("button", name="Add a tenant")).to_have_count(0)
    assert not [url for url in refused if "/v1/tenants" in url or "/v1/keys" in url or "/v1/usage" in url]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
