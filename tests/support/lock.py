"""Writes requirements.lock: what Personae needs to run, alone or as one of several servers, with hashes.

    python tests/support/lock.py        # needs `uv` on the PATH, and the network

It is for `pip install --require-hashes --no-deps -r requirements.lock`. It does not contain torch: each of
torch's builds (CPU, CUDA, ROCm) has its own hashes under the same version, and installs its own parts of
CUDA.
"""

import re
import subprocess
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
# torch brings setuptools, too, and its CUDA build brings Triton. xgrammar names Triton and works without it.
BY_BUILD = {"torch", "setuptools", "triton"}
EXTRAS = ("object-store", "postgres", "xgrammar")  # all of serving, of one or of several servers
HEADER = """\
# What Personae and its extras object-store, postgres and xgrammar need to run, without torch: made by
# `make lock` from constraints.txt.
# Install torch first, in the build that you want; docs/operate/operations.md says how.
"""


def pinned() -> dict[str, str]:
    """Versions by name, from constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def direct(extras: tuple[str, ...] = EXTRAS) -> list[Requirement]:
    """The requirements of pyproject.toml at run time, with those of `extras`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = [text for name in extras for text in project["optional-dependencies"][name]]
    return [Requirement(text) for text in (*project["dependencies"], *optional)]


def closure(extras: tuple[str, ...] = EXTRAS) -> set[str]:
    """The names of all packages that are needed at run time, with these extras."""
    todo = [(each.name, frozenset(each.extras)) for each in direct(extras)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        todo += [
            (each.name, frozenset(each.extras))
            for each in map(Requirement, requires(name) or ())
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in wanted or {""})
        ]
    return {canonicalize_name(name) for name, _ in seen}


def needed() -> dict[str, str]:
    """Everything that is needed at run time, as requirement lines by name: pinned, with the marker from
    pyproject.toml. Raises KeyError for a package that is not pinned."""
    versions = pinned()
    markers = {canonicalize_name(each.name): each.marker for each in direct()}
    names = sorted(closure() - BY_BUILD)
    lines = {name: f"{name}=={versions[name]}" for name in names}
    return {name: f"{line} ; {markers[name]}" if markers.get(name) else line for name, line in lines.items()}


def locked() -> dict[str, tuple[str, list[str]]]:
    """The content of requirements.lock: a requirement line and its hashes, by name."""
    found = {}
    for entry in re.split(r"\n(?=[a-z])", LOCK.read_text(encoding="utf-8").partition("\n\n")[2]):
        line, *hashes = (part.strip() for part in entry.replace("\\", " ").split("--hash=sha256:"))
        found[line.partition("==")[0]] = (line, hashes)
    return found


def main() -> None:
    """Get the hashes of every file of each release from the index, and write them."""
    command = [
        *("uv", "pip", "compile", "-", "--no-deps", "--generate-hashes", "--universal"),
        *("--no-header", "--no-annotate", "--quiet", "--python-version", "3.11"),
    ]
    text = "\n".join(needed().values())
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, cwd="/")
    if done.returncode:
        raise SystemExit(done.stderr)
    LOCK.write_text(f"{HEADER}\n{done.stdout}", encoding="utf-8")


if __name__ == "__main__":
    main()
