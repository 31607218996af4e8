"""What the console's pages cost and how they look: the script has every tab, and the docs every picture."""

import re
import struct
from pathlib import Path

import pytest

from personae.api.console.pages import STATIC
from personae.evals.console_pages import SCREENS, VIEWS, Cost

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
PICTURES = {
    f"console-{view.picture}{screen}.png": SCREENS[screen]
    for view in VIEWS.values()
    for screen in view.screens
}


def test_every_tab_is_measured() -> None:
    tabs = re.findall(r'^  (\w+): \["', (STATIC / "app.js").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(tabs) > 4
    assert {view.tab for view in VIEWS.values()} == set(tabs)


def test_the_docs_have_every_picture_and_no_others() -> None:
    assert {path.name for path in GUIDE.glob("console-*.png")} == set(PICTURES)
    page = (GUIDE / "console.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((console-[\w-]+\.png)\)", page)) == set(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_as_large_as_its_screen(name: str) -> None:
    assert struct.unpack(">II", (GUIDE / name).read_bytes()[16:24]) == PICTURES[name]


def test_a_cost_is_what_was_used_since_and_the_median_is_of_each_number() -> None:
    assert Cost(5, 4, 20).since(Cost(2, 1, 10)) == Cost(3, 3, 10)
    assert Cost.median([Cost(1, 9, 5), Cost(2, 7, 6), Cost(3, 8, 4)]) == Cost(2, 8, 5)
    assert str(Cost(1.25, 0, 30)) == "1.2 | 0.0 | 30.0"
