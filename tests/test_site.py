"""The documentation as a static site: it builds without a warning, and nothing of it is lost."""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from diagrams import DRAWN, diagrams
from docs_site import ROOT, build, collect
from patience import PATIENCE
from playwright.sync_api import sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LIMIT = 1000 * PATIENCE  # milliseconds
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
ANCHOR = re.compile(r"\]\((?!https?:)([^)\s#]*)#([^)\s]+)\)")


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def test_every_page_is_collected_and_links_lead_to_pages(tmp_path: Path) -> None:
    collect(tmp_path / "pages")
    found = {str(path.relative_to(tmp_path / "pages")) for path in (tmp_path / "pages").rglob("*.md")}
    wanted = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert found == wanted | {"index.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}
    index = (tmp_path / "pages" / "index.md").read_text(encoding="utf-8")
    assert "](guide/examples.md)" in index
    assert "](docs/" not in index
    operations = (tmp_path / "pages" / "operate" / "deployment.md").read_text(encoding="utf-8")
    assert "deploy/helm/personae/values.yaml)" not in operations, "not a page"


def test_every_link_to_a_heading_leads_to_one() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    texts = {page.resolve(): page.read_text(encoding="utf-8") for page in pages}
    headings = {page: {anchor(line) for line in HEADING.findall(text)} for page, text in texts.items()}
    broken = [
        f"{page.relative_to(ROOT)}: {path}#{wanted}"
        for page, text in texts.items()
        for path, wanted in ANCHOR.findall(text)
        if wanted not in headings.get((page.parent / path).resolve() if path else page, {wanted})
    ]
    assert broken == []


def test_every_diagram_is_drawn_as_it_is_written_and_no_drawing_is_left_over() -> None:
    assert {path.name for path in DRAWN.iterdir()} == {diagram.name for diagram in diagrams()}


def test_a_diagram_that_was_changed_and_not_drawn_again_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("docs_site.DRAWN", tmp_path / "diagrams")
    with pytest.raises(FileNotFoundError, match=r"run tests/support/diagrams\.py to draw “"):
        collect(tmp_path / "pages")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.skipif(find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_pages_with_diagrams_are_complete_without_a_network(tmp_path: Path) -> None:
    build(tmp_path / "site", tmp_path / "pages")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=LIMIT)
        page = browser.new_page()
        page.set_default_timeout(LIMIT)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "site" / "architecture.html").as_uri())
        page.wait_for_load_state("networkidle")
        widths = page.locator("article img").evaluate_all("all => all.map(one => one.naturalWidth)")
        browser.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert len(widths) >= 3, "the request path, the processes, the memory"
    assert all(width > 300 for width in widths)


@pytest.mark.skipif(find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build(tmp_path / "site", tmp_path / "pages")
    page = (tmp_path / "site" / "guide" / "responses.html").read_text(encoding="utf-8")
    assert "Conversations" in page
    loaded = re.findall(r'(?:<script[^>]+src|<link[^>]+rel="stylesheet"[^>]+href)="(https?:[^"]+)"', page)
    assert loaded == [], "pages load nothing from elsewhere"
