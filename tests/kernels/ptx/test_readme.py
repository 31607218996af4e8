"""The examples of the interpreter's README run, and print what it says."""

import re
import runpy
from pathlib import Path

import ptx
import pytest

pytest.importorskip("triton")
README = (Path(ptx.__file__).parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_every_example_runs_and_prints_what_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples, (shown,) = blocks("python"), blocks("text")
    assert len(examples) == 2
    printed = []
    for number, text in enumerate(examples):
        file = tmp_path / str(number) / "example.py"  # Triton reads a kernel's source from its file
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
        runpy.run_path(str(file))
        printed.append(capsys.readouterr().out)
    # Triton keeps what it compiled, with the name that the file had then.
    own = re.compile(r"0x[0-9a-f]+|\w+\.py")
    assert own.sub("", printed[0]) == own.sub("", shown)
    assert printed[1]


def test_every_file_of_the_package_is_named() -> None:
    folder = Path(ptx.__file__).parent
    named = re.findall(r"`([a-z_]+\*?\.(?:py|json))`", README)
    found = {path.name for name in named for path in folder.glob(name)}
    assert found >= {path.name for path in folder.iterdir() if path.suffix in (".py", ".json")} - {
        "__init__.py"
    }
    assert all(any(folder.glob(name)) for name in named if name != "example.py")
