"""The console's tab Adapters on a server with keys: who sees which, who uses them, who deletes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from live_server import serving
from patience import PATIENCE
from playwright.sync_api import Dialog, Locator, Page, expect
from uploads import UploadFixture, open_fixture, whole

from personae.api.app import create_app
from personae.api.settings import ApiSettings
from personae.api.tenants.store import Identity
from personae.api.tenants.usage import UsageLedger


@dataclass
class Site:
    """A served fixture whose tenants have adapters: ann and bob a `poet` each, root a shared `lawyer`."""

    url: str
    fixture: UploadFixture
    keys: dict[str, str]
    ledger: UsageLedger

    def upload(self, tenant: str, name: str, seed: int, **fields: str) -> None:
        files = {field: ("x", content) for field, content in whole(seed).items()}
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        answer = httpx.post(
            f"{self.url}/v1/adapters",
            data={"name": name, **fields},
            files=files,
            headers=headers,
            timeout=PATIENCE,
        )
        assert answer.status_code == 201, answer.text


@contextmanager
def opened(path: Path, settings: ApiSettings | None = None) -> Iterator[Site]:
    with open_fixture(path) as fixture:
        keys = {"root": fixture.key("root", "admin"), "ann": fixture.key("ann"), "bob": fixture.key("bob")}
        ledger = UsageLedger(fixture.data)
        stores = {"tenants": fixture.tenants, "registry": fixture.registry, "usage": ledger}
        app = create_app(fixture.engine, settings, **stores)
        with serving(app) as url:
            site = Site(url, fixture, keys, ledger)
            site.upload("ann", "poet", 1)
            site.upload("bob", "poet", 2)
            site.upload("root", "lawyer", 3, shared="true")
            yield site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with opened(tmp_path) as site:
        yield site


def enter(page: Page, site: Site, tenant: str) -> None:
    page.goto(f"{site.url}/#adapters")
    page.get_by_label("Key").fill(site.keys[tenant])
    page.get_by_role("button", name="Use it").click()


def card(page: Page, name: str, tenant: str | None = None) -> Locator:
    found = page.get_by_role("article", name=name, exact=True)
    return found if tenant is None else found.filter(has=page.get_by_role("definition").get_by_text(tenant))


def rows(card: Locator) -> Locator:
    return card.locator("tbody tr")


def test_an_admin_sees_who_uses_which_adapter_and_deletes_any(page: Page, site: Site) -> None:
    for tenant, name, times in (("ann", "poet", 3), ("ann", "lawyer", 1), ("bob", "lawyer", 2)):
        for _ in range(times):
            site.ledger.add(Identity(tenant, "tenant"), name, 100, 40, 7, 0.5)
    enter(page, site, "root")
    expect(page.get_by_role("article")).to_have_count(3)
    ann, bob = card(page, "poet", "ann"), card(page, "poet", "bob")
    expect(rows(ann)).to_have_count(1)
    assert rows(ann).locator("td").all_inner_texts()[:4] == ["ann", "3", "300", "21"]
    expect(bob).to_contain_text("Nobody used it in the last 30 days.")
    lawyer = card(page, "lawyer")
    expect(lawyer.get_by_text("Used by 2 tenants")).to_be_visible()
    expect(rows(lawyer).nth(0).locator("td").first).to_have_text("bob")  # who used most stands first
    expect(rows(lawyer).nth(1).locator("td").first).to_have_text("ann")
    asked: list[str] = []

    def accept(dialog: Dialog) -> None:
        asked.append(dialog.message)
        dialog.accept()

    page.on("dialog", accept)
    bob.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("poet was deleted.")).to_be_visible()
    expect(page.get_by_role("article")).to_have_count(2)
    assert asked == ["Delete the adapter poet of bob?"]
    assert site.fixture.registry.own("bob") == ()
    assert [one.name for one in site.fixture.registry.own("ann")] == ["poet"]


def test_adapters_stand_in_the_order_in_which_people_count(page: Page, site: Site) -> None:
    for seed, name in enumerate(("voice-10", "voice-9")):
        site.upload("ann", name, seed)
    enter(page, site, "ann")
    shown = page.get_by_role("article")
    expect(shown).to_have_count(4)
    names = [shown.nth(place).get_attribute("aria-label") for place in range(4)]
    assert [name for name in names if name and name.startswith("voice")] == ["voice-9", "voice-10"]
    expect(page.get_by_text("adapter_config.json is missing")).to_have_count(0)  # before any file was chosen


def test_a_tenant_sees_its_own_adapters_and_its_own_use_of_shared_ones(page: Page, site: Site) -> None:
    for tenant in ("ann", "bob"):
        site.ledger.add(Identity(tenant, "tenant"), "lawyer", 100, 40, 7, 0.5)
    site.ledger.add(Identity("ann", "tenant"), "poet", 9, 0, 5, 0.5)
    enter(page, site, "ann")
    expect(page.get_by_role("article")).to_have_count(2)
    for name, numbers in (("poet", ["ann", "1", "9", "5"]), ("lawyer", ["ann", "1", "100", "7"])):
        expect(rows(card(page, name))).to_have_count(1)
        assert rows(card(page, name)).locator("td").all_inner_texts()[:4] == numbers
    assert "bob" not in page.locator("main").inner_text()


def test_many_adapters_are_found_by_name_or_tenant(page: Page, site: Site) -> None:
    for number in range(4):
        site.upload("bob", f"voice-{number}", 4)
    enter(page, site, "root")
    expect(page.get_by_role("article")).to_have_count(7)
    page.get_by_label("Find by name or tenant").fill("VOICE-3")
    expect(page.get_by_role("article")).to_have_count(1)
    page.get_by_label("Find by name or tenant").fill("bob")
    expect(page.get_by_role("article")).to_have_count(5)


def test_an_admin_fetches_an_adapter_and_gives_a_tenants_adapter_defaults(page: Page, tmp_path: Path) -> None:
    (tmp_path / "team" / "bard").mkdir(parents=True)
    for name, content in whole(7).items():
        (tmp_path / "team" / "bard" / name).write_bytes(content)
    with opened(tmp_path / "data", ApiSettings(adapter_source=(f"file://{tmp_path}/team",))) as site:
        enter(page, site, "root")
        page.get_by_label("Source").fill("hf://org/poet")
        page.get_by_role("button", name="Fetch", exact=True).click()
        expect(page.get_by_role("alert")).to_contain_text("is not below one of the server's --adapter-source")
        page.get_by_label("Source").fill(f"file://{tmp_path}/team/bard")
        page.get_by_role("button", name="Fetch", exact=True).click()
        expect(page.get_by_text("bard was fetched and checked (version 1).")).to_be_visible()
        expect(card(page, "bard")).to_contain_text(f"file://{tmp_path}/team/bard")

        poet = card(page, "poet", "ann")
        poet.get_by_text("Defaults", exact=True).click()
        field = poet.get_by_label("What requests get that leave fields out")
        expect(field).to_have_value("{}")
        field.fill('{"temperature": 5}')
        poet.get_by_role("button", name="Save defaults").click()
        expect(poet.get_by_role("alert")).to_contain_text("defaults.temperature")
        field.fill('{"system": "You rhyme.", "temperature": 0.3, "max_tokens": 77}')
        poet.get_by_role("button", name="Save defaults").click()
        expect(poet.get_by_text("Saved.")).to_be_visible()

        page.goto(f"{site.url}/#playground")
        page.reload()
        page.get_by_label("Key").fill(site.keys["ann"])
        page.get_by_role("button", name="Use it").click()
        page.get_by_label("Model of column 1").select_option("poet")
        expect(page.get_by_label("System prompt")).to_have_attribute("placeholder", "You rhyme.")
        expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "0.3")
        expect(page.get_by_label("Most tokens")).to_have_attribute("placeholder", "77")
        page.get_by_label("Message").fill("hi")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_label("Conversation 1")).to_contain_text("Hello, world!")
        params = site.fixture.engine.submitted[-1].params
        assert (params.temperature, params.max_tokens) == (0.3, 77)


@pytest.mark.parametrize("width", [1400, 390])
def test_each_of_many_adapters_is_one_line_until_it_is_opened(page: Page, site: Site, width: int) -> None:
    for number in range(12):
        site.upload("bob", f"voice-{number}", 4)
    page.set_viewport_size({"width": width, "height": 900})
    enter(page, site, "root")
    expect(page.get_by_role("article")).to_have_count(15)
    assert page.evaluate("document.documentElement.scrollHeight") < 2500
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    voice = card(page, "voice-7")
    expect(voice).to_contain_text("version 1 · rank 2")
    expect(voice.get_by_role("button", name="Delete")).to_be_hidden()
    voice.get_by_role("heading", name="voice-7").click()
    expect(voice.get_by_role("button", name="Delete")).to_be_visible()
    page.get_by_label("Find by name or tenant").fill("voice-1")
    expect(card(page, "voice-11").get_by_role("button", name="Delete")).to_be_visible()
