"""Imports go down only; this reads them and says where one goes up."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {
    "api": {"api", "actors", "engine", "lora", "grammar", "kernels"},
    "integrations": {"integrations", "api"},
    "evals": {"evals", "integrations", "api", "actors", "engine", "lora", "grammar", "kernels"},
    "actors": {"actors", "engine", "lora", "grammar", "kernels"},
    "engine": {"engine", "lora", "grammar", "kernels"},
    "lora": {"lora", "kernels"},
    "grammar": {"grammar", "kernels"},
    "kernels": {"kernels"},
}
# Rooms of capabilities that are to come.
PLANNED = {"api/NAME/"}
KIT_MAY_USE = set(sys.stdlib_module_names) | {"anyio", "msgspec", "sniffio"}


def imported_modules(path: Path) -> list[str]:
    """The absolute names that a file imports, `from personae import x` spelled out as `personae.x`."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            if module == "personae":
                names += [f"personae.{alias.name}" for alias in node.names]
            else:
                names.append(module)
    return names


def source_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", FLOORS)
def test_imports_go_down_only(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in source_files(folder)
        for name in imported_modules(path)
        if name.startswith("personae.")
        and name.split(".")[1] not in FLOORS[folder] | {"errors", "__version__"}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_actor_kit_knows_anyio_and_nothing_of_personae() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in source_files("actors/kit")
        for name in imported_modules(path)
        if not name.startswith(("personae.actors.kit", "personae.errors"))
        and name.split(".")[0] not in KIT_MAY_USE
    ]
    assert not wrong, "\n".join(wrong)


def test_errors_stand_below_everything() -> None:
    assert not [name for name in imported_modules(ROOT / "errors.py") if name.startswith("personae")]


def test_every_folder_has_a_floor() -> None:
    linked = {path.name for path in (ROOT / ".pkg" / "personae").iterdir() if path.is_symlink()}
    assert linked - {"errors.py"} == set(FLOORS)
    assert all(source_files(folder) for folder in FLOORS)


def test_the_kernels_folder_is_not_mistaken_for_the_package_of_that_name() -> None:
    # transformers probes for a top-level `kernels` with a version; ours must never look like one.
    assert "__version__" not in (ROOT / "kernels" / "__init__.py").read_text(encoding="utf-8")


def test_the_files_that_the_architecture_names_are_there_and_its_spine_has_as_many_lines_as_it_says() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:actors|api|engine|evals|grammar|kernels|lora)/[\w/]+(?:\.py|/))`", page)
    assert [name for name in named if not (ROOT / name).exists() and name not in PLANNED] == []
    spine = page[page.index("## The spine") : page.index("## Options")]
    files = re.findall(r"`([\w/]+\.py)`", spine)
    lines = sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in files)
    told = re.search(r"Together they have ([\d,]+) lines", spine)
    assert told is not None
    assert len(files) == len(set(files)) > 40
    assert abs(lines - int(told[1].replace(",", ""))) < 0.03 * lines, f"they have {lines:,}"
