"""Draws the Mermaid diagrams of the documentation into docs/diagrams, for the static site.

    python tests/support/diagrams.py

It needs npm, which downloads Mermaid, and a Chromium. Run it after a change of a diagram; the site itself
shows the drawn files, so it needs neither. A file's name is a hash of the diagram's source.
"""

import base64
import hashlib
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DRAWN = ROOT / "docs" / "diagrams"
MERMAID = "11.17.2"
INTEGRITY = "V6K3C8EBdEsPFZXSKMJe6ppQOENxuHARr9GvHX4hh47lAbhMRD9qf4oEK7LoaRQxULMa80/qt5gHO73aCleBBg=="
"""SHA-512 of the package, as npm states it."""

BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_TITLE = re.compile(r"^\s*accTitle:\s*(.+)$", re.MULTILINE)
_SETTINGS = """{
    startOnLoad: false, theme: "neutral", securityLevel: "strict", deterministicIds: true, htmlLabels: false,
    fontFamily: "system-ui, sans-serif", flowchart: {htmlLabels: false, useMaxWidth: false},
    sequence: {useMaxWidth: false, wrap: true, actorMargin: 24, width: 120},
}"""
_DRAW = f"async ([source, id]) => (mermaid.initialize({_SETTINGS}), (await mermaid.render(id, source)).svg)"


class Diagram(NamedTuple):
    """A diagram's source, and its title for those who do not see it."""

    source: str
    title: str

    @classmethod
    def of(cls, source: str) -> "Diagram":
        """Raises ValueError without `accTitle`."""
        title = _TITLE.search(source)
        if title is None:
            raise ValueError(f"the diagram has no accTitle:\n{source}")
        return cls(source, title[1].strip())

    @property
    def name(self) -> str:
        """The file that it is drawn into."""
        return f"{hashlib.sha256(self.source.encode()).hexdigest()[:12]}.svg"


def diagrams() -> Iterator[Diagram]:
    """All diagrams of the documentation."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
            yield Diagram.of(block[1])


def mermaid(folder: Path) -> str:
    """Mermaid's script. Raises ValueError if npm gives something else."""
    command = ["npm", "pack", "--silent", f"mermaid@{MERMAID}"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    package = folder / f"mermaid-{MERMAID}.tgz"
    if base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode() != INTEGRITY:
        raise ValueError(f"{package.name} is not the package that was reviewed")
    with tarfile.open(package) as archive:
        script = archive.extractfile("package/dist/mermaid.min.js")
        assert script is not None
        return script.read().decode()


def draw(script: str) -> None:
    """Draw all diagrams, and remove the drawings that no page has any more."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    shutil.rmtree(DRAWN, ignore_errors=True)
    DRAWN.mkdir()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page()
        page.add_script_tag(content=script)
        for diagram in diagrams():
            svg = page.evaluate(_DRAW, [diagram.source, "diagram"])
            svg = svg.replace("<svg ", '<svg style="background: white" ', 1)  # also where pages are dark
            (DRAWN / diagram.name).write_text(svg + "\n", encoding="utf-8")
        browser.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        draw(mermaid(Path(folder)))
    print(*sorted(DRAWN.iterdir()), sep="\n")
