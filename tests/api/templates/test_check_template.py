"""`personae check-template` says what a template shows."""

import json
from pathlib import Path

import pytest
from tiny_models import CHATML, make_model_folder
from tool_chat import TEMPLATE
from typer.testing import CliRunner

from personae.api.cli import app
from personae.api.hub.files import template_files
from personae.api.hub.names import HubName


def checked(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["check-template", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def rows(output: str) -> dict[str, list[str]]:
    """The cells of each row, by its name."""
    lines = [line for line in output.splitlines() if "  " in line]
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    return {name: values for name, *values in cells}


def test_a_file_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "some.jinja"
    file.write_text(TEMPLATE)
    output = checked(str(file))
    assert output.startswith("tool format hermes, reasoning format think\n")
    found = rows(output)
    assert found["tools"] == found["calls and results"] == found["earlier reasoning"] == ["shown"]
    file.write_text("{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
    assert rows(checked(str(file)))["tools"] == ["described"]


def test_a_models_templates_are_columns(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    both = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TEMPLATE}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": both}))
    found = rows(checked(str(folder)))
    assert found["PART OF A CONVERSATION"] == ["DEFAULT", "TOOL_USE"]
    assert found["tools"] == ["described", "shown"]


def test_the_default_model_is_checked_without_an_argument() -> None:
    assert rows(checked())["a message of the user"] == ["shown"]


def test_a_template_that_shows_nothing_says_what_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "some.jinja"
    file.write_text("{% set own = 1 %}{% if functions + own %}{{ messages[0].content }}{% endif %}")
    assert "The variables that only requests set: functions." in checked(str(file))


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"{% if %}", "not valid Jinja"), (b"\xff\xfe", "cannot be read"), (None, "not exist")],
)
def test_what_is_no_template_is_an_error(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "some.jinja"
    if content is not None:
        file.write_bytes(content)
    result = CliRunner().invoke(app, ["check-template", str(file)])
    assert result.exit_code == 2
    assert why in result.output


def test_only_the_files_that_a_template_needs_are_downloaded() -> None:
    name = HubName("org/model")
    files = ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "model.py"]
    assert template_files(name, files) == files[:3]
    assert template_files(name, ["model-Q4.gguf"]) == ["model-Q4.gguf"]
