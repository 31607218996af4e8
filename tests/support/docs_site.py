"""Builds the documentation as one static site, from the Markdown files that the repository has.

    python tests/support/docs_site.py [DIR]          # build/site

It needs mkdocs-material (`pip install -e .[site]`), and no network.
"""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from diagrams import BLOCK, DRAWN, Diagram

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_LINK = re.compile(r"\[([^\[\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def collect(pages: Path) -> None:
    """Copies the documentation to `pages`: README becomes the index. Links to files that are no pages lose
    their target. Diagrams become the files that `diagrams.py` drew. Raises FileNotFoundError if a diagram was
    changed and not drawn again."""
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "docs", pages)
    for name in PAGES:
        shutil.copyfile(ROOT / name, pages / name)
    shutil.copyfile(ROOT / "README.md", pages / "index.md")
    for page in sorted(pages.rglob("*.md")):
        text = BLOCK.sub(partial(_drawing, page=page, pages=pages), page.read_text(encoding="utf-8"))
        parts = _CODE.split(text)
        parts[::2] = [_LINK.sub(partial(_link, page=page, pages=pages), part) for part in parts[::2]]
        page.write_text("".join(parts), encoding="utf-8")


def _drawing(block: re.Match[str], page: Path, pages: Path) -> str:
    """An image in the place of a diagram's source."""
    diagram = Diagram.of(block[1])
    if not (DRAWN / diagram.name).is_file():
        raise FileNotFoundError(f"{page.name}: run tests/support/diagrams.py to draw “{diagram.title}”")
    return f"![{diagram.title}]({os.path.relpath(pages / DRAWN.name / diagram.name, page.parent)})"


def _link(link: re.Match[str], page: Path, pages: Path) -> str:
    """A link of a page, to where the file is in the site."""
    place = page.relative_to(pages)
    source = ROOT / (place if place.name in PAGES and len(place.parts) == 1 else Path("docs") / place)
    if place == Path("index.md"):
        source = ROOT / "README.md"
    target = Path(os.path.normpath(source.parent / link[2]))
    if target == ROOT / "README.md":
        found = pages / "index.md"
    elif target.is_relative_to(ROOT / "docs"):
        found = pages / target.relative_to(ROOT / "docs")
    else:
        found = pages / target.relative_to(ROOT) if target.is_relative_to(ROOT) else pages / "nowhere"
    if not found.is_file():
        return link[1]
    return f"[{link[1]}]({os.path.relpath(found, page.parent)}{link[3] or ''})"


def build(to: Path, pages: Path) -> None:
    """Builds the site. Raises CalledProcessError, also for a warning: a link that leads nowhere is one."""
    collect(pages)
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    own = settings.replace("docs_dir: build/site-pages", f"docs_dir: {pages}")
    own = own.replace("site_dir: build/site", f"site_dir: {to}")
    config = pages.parent / "mkdocs.yml"
    config.write_text(own, encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(config)],
        check=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "build" / "site"
    target.parent.mkdir(parents=True, exist_ok=True)
    build(target, target.parent / "site-pages")
    print(target / "index.html")
