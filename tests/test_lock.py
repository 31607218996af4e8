"""requirements.lock has what Personae needs to run, as constraints.txt pins it, and hashes of every file."""

import re

import pytest
from lock import BY_BUILD, ROOT, closure, direct, locked, needed, pinned
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PLATFORMS = {"linux": "Linux", "darwin": "Darwin", "win32": "Windows"}


def meaning(line: str) -> tuple[str, str, list[bool]]:
    """A requirement's name and version, and on which platforms it holds, however that is written."""
    found = Requirement(line)
    environments = [{"sys_platform": name, "platform_system": system} for name, system in PLATFORMS.items()]
    holds = [found.marker is None or found.marker.evaluate(each) for each in environments]
    return found.name, str(found.specifier), holds


def test_the_lock_has_what_is_needed_to_run_as_constraints_pin_it_and_nothing_else() -> None:
    lock = {name: meaning(line) for name, (line, _) in locked().items()}
    assert lock == {name: meaning(line) for name, line in needed().items()}, "run `make lock`"
    versions = pinned()
    for name, (_, version, _) in lock.items():
        assert version == f"=={versions[name]}"
    assert lock["uvloop"][2] == [True, True, False]
    names = {canonicalize_name(each.name) for each in direct()}
    assert names - BY_BUILD <= lock.keys()
    assert not {"pytest", "mypy", "peft", "torch", "triton", "opentelemetry-sdk"} & lock.keys()


def test_serving_needs_fewer_than_sixty_packages() -> None:
    alone = closure(extras=()) - {"triton"}  # which only CUDA's torch names
    assert len(alone) < 60
    assert not {"xgrammar", "transformers", "pytest", "requests-toolbelt", "pandas"} & alone


def test_every_file_of_a_release_has_a_hash() -> None:
    for name, (_, hashes) in locked().items():
        assert hashes, name
        assert len(set(hashes)) == len(hashes)
        assert all(re.fullmatch("[0-9a-f]{64}", each) for each in hashes), name


@pytest.mark.parametrize("name", ["numpy", "msgspec", "tokenizers"])
def test_other_machines_and_pythons_have_hashes_too(name: str) -> None:
    _, hashes = locked()[name]
    assert len(hashes) > 8


def test_nothing_tells_to_install_personae_by_its_name_which_is_on_no_index() -> None:
    folders = (
        "actors",
        "api",
        "docs",
        "engine",
        "evals",
        "grammar",
        "integrations",
        "kernels",
        "lora",
        "tests",
    )
    files = [file for name in folders for kind in ("*.py", "*.md") for file in (ROOT / name).rglob(kind)]
    files = [file for file in files if "node_modules" not in file.parts] + [ROOT / "README.md"]
    told = [(file, line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    commands = [(file, line) for file, line in told if re.search(r"(pipx?|uv tool) install ", line)]
    assert len(commands) > 20
    wrong = r"(pipx?|uv tool) install [^`]*?(?<![\w/])personae\b(?!/)"
    assert [(str(file), line) for file, line in commands if re.search(wrong, line)] == []
