"""The table of docs/guide/clients.md: whose tests are restated, in how many cases, and what is done
otherwise.

python -m personae.evals.suites.entrypoints.table
"""

from collections.abc import Iterator

import personae.evals.suites.entrypoints.suite  # noqa: F401  # registers them
from personae.evals.suites.entrypoints.kit import CHECKS, Restated

HEAD = ("| test file | cases | as there | otherwise, on purpose |", "|---|---|---|---|")


def rows() -> Iterator[str]:
    """A line for each of their files."""
    files: dict[tuple[str, str], list[Restated]] = {}
    for one in CHECKS:
        files.setdefault((one.project, one.file), []).append(one)
    for (project, file), cases in sorted(files.items(), key=lambda item: (item[0][0] != "vLLM", item[0])):
        others = [one for one in cases if one.differs]
        reasons = "; ".join(dict.fromkeys(one.differs for one in others))
        told = f"{len(others)}: {reasons}" if others else ""
        yield f"| {project} `{file}` | {len(cases)} | {len(cases) - len(others)} | {told} |"


def table() -> str:
    """All of it."""
    return "\n".join([*HEAD, *rows()])


if __name__ == "__main__":
    print(table())
