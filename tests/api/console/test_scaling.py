"""Engines are added and removed on the console's page Live."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from planted_console import NamedAdapter, planted_console
from playwright.sync_api import Dialog, Locator, Page, expect
from programs import Program

from personae.actors.replicas.scaling import ReplicaInfo
from personae.errors import Conflict


class PlantedScaler:
    """Engines in the states that a test wants. A change begins when it is asked for."""

    most = 4

    def __init__(self) -> None:
        self.engines = [ReplicaInfo(0, "ready", running=2), ReplicaInfo(1, "ready", waiting=1, restarts=3)]
        self.asked: list[int] = []

    def list(self) -> list[ReplicaInfo]:
        return self.engines

    async def scale(self, count: int, drain_seconds: float) -> None:
        self.asked.append(count)
        if count == self.most:
            raise Conflict("There is no room for four engines.", param="replicas")
        kept = self.engines[:count]
        drained = [ReplicaInfo(one.id, "draining") for one in self.engines[count:]]
        added = [ReplicaInfo(id, "starting") for id in range(len(self.engines), count)]
        self.engines = [*kept, *drained, *added]


@pytest.fixture
def scaler() -> PlantedScaler:
    return PlantedScaler()


@pytest.fixture
def live(page: Page, scaler: PlantedScaler, tmp_path: Path) -> Iterator[Page]:
    with planted_console(tmp_path, NamedAdapter(), scaler=scaler) as url:
        page.goto(f"{url}/#live")
        yield page


def states(page: Page) -> Locator:
    """The states of all engines, from the table."""
    return page.get_by_label("Table of engines").locator("tbody tr td:nth-child(2)")


def scale(page: Page, count: int) -> None:
    page.get_by_label("Engines (at most 4)").fill(str(count))
    page.get_by_role("button", name="Scale").click()


def test_an_added_engine_is_listed_at_once_and_ready_when_it_is(live: Page, scaler: PlantedScaler) -> None:
    expect(states(live)).to_have_text(["ready", "ready"])
    expect(live.get_by_label("Table of engines").locator("tbody tr").nth(1)).to_contain_text("3")
    expect(live.get_by_role("button", name="Scale")).to_be_disabled()
    scale(live, 3)
    expect(states(live)).to_have_text(["ready", "ready", "starting"])
    scaler.engines = [*scaler.engines[:2], ReplicaInfo(2, "ready")]
    expect(states(live)).to_have_text(["ready", "ready", "ready"])
    assert scaler.asked == [3]


def test_an_engine_is_removed_only_after_a_confirmation(live: Page, scaler: PlantedScaler) -> None:
    expect(states(live)).to_have_count(2)
    said: list[str] = []
    answers = iter((False, True))

    def confirm(dialog: Dialog) -> None:
        said.append(dialog.message)
        if next(answers):
            dialog.accept()
        else:
            dialog.dismiss()

    live.on("dialog", confirm)
    scale(live, 1)
    expect(live.get_by_label("Engines (at most 4)")).to_have_value("1")
    assert scaler.asked == []
    scale(live, 1)
    expect(states(live)).to_have_text(["ready", "draining"])
    assert said == ["Drain and remove 1 of 2 engines?"] * 2
    scaler.engines = scaler.engines[:1]
    expect(states(live)).to_have_text(["ready"])
    assert scaler.asked == [1]


def test_a_number_of_engines_that_is_refused_shows_why_and_changes_nothing(live: Page) -> None:
    expect(states(live)).to_have_count(2)
    scale(live, 4)
    expect(live.get_by_label("Engines", exact=True).get_by_role("alert")).to_contain_text(
        "There is no room for four engines."
    )
    expect(states(live)).to_have_text(["ready", "ready"])


def test_a_server_with_one_engine_shows_no_control(page: Page, tmp_path: Path) -> None:
    with planted_console(tmp_path, NamedAdapter()) as url:
        page.goto(f"{url}/#live")
        expect(states(page)).to_have_count(1)
        expect(page.get_by_role("button", name="Scale")).to_have_count(0)


def test_a_real_engine_is_started_and_removed_from_the_page(page: Page) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    with Program(
        "-m", "personae", "serve", "demo", "--port", "0", "--device", "cpu", "--replicas", "1:4"
    ) as server:
        found = re.match(r"personae ready (\S+)", server.line())
        assert found is not None
        page.goto(f"{found[1]}/#live")
        expect(states(page)).to_have_text(["ready"])
        scale(page, 2)
        expect(states(page)).to_have_text(["ready", "ready"])
        scale(page, 1)
        expect(states(page)).to_have_text(["ready"])
