"""The documentation as a static site: it builds without a warning, and nothing of it is lost."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from docs_site import ROOT, build, collect


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


@pytest.mark.skipif(find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build(tmp_path / "site", tmp_path / "pages")
    page = (tmp_path / "site" / "guide" / "responses.html").read_text(encoding="utf-8")
    assert "Conversations" in page
    shown = (tmp_path / "site" / "architecture.html").read_text(encoding="utf-8")
    assert shown.count('class="mermaid"') >= 3, "the request path, the processes, the memory"
    loaded = re.findall(r'(?:<script[^>]+src|<link[^>]+rel="stylesheet"[^>]+href)="(https?:[^"]+)"', page)
    assert loaded == [], "pages load nothing from elsewhere"
