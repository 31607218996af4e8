"""What `personae serve --model NAME=MODEL` takes and refuses, before anything is loaded."""

from pathlib import Path

import pytest
from tiny_models import model_folder
from typer.testing import CliRunner

from personae.api.base_models.open import options_by_name
from personae.api.cli import app
from personae.api.options import ServeOptions
from personae.errors import LoadError


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder("qwen3")


def said(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["serve", "--dry-run", *arguments])
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (["model"], "names no model"),
        (["a="], "names no model"),
        (["a b=demo"], "cannot be a model's name"),
        (["a@1=demo"], "cannot be a model's name"),
        (["a=demo", "a=demo"], "is given twice"),
        (["a=no/such/folder"], "does not exist"),
        (["a=nowhere"], "does not exist"),
    ],
)
def test_a_value_that_is_no_model_is_refused_by_name(values: list[str], why: str) -> None:
    code, output = said(*[part for value in values for part in ("--model", value)])
    assert code == 2
    assert why in output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--served-model-name", "x"],
        ["--adapters", "DIR"],
        ["--draft-model", "demo"],
        ["--kv-events", "tcp://127.0.0.1:5557"],
        ["--replicas", "1:2"],
        ["--tool-format", "hermes"],
        ["demo"],
    ],
)
def test_an_option_for_one_model_is_refused_with_several(
    arguments: list[str], folder: Path, tmp_path: Path
) -> None:
    given = [str(tmp_path) if each == "DIR" else each for each in arguments]
    code, output = said(*given, "--model", f"a={folder}", "--model", "b=demo")
    assert code == 2
    assert "is for one model" in output


@pytest.mark.parametrize("option", ["--keep-alive", "--models-memory"])
def test_an_option_for_several_models_needs_them(option: str) -> None:
    with pytest.raises(LoadError, match=f"{option} needs --model NAME=MODEL"):
        options_by_name(ServeOptions(**{option[2:].replace("-", "_"): 5}))  # type: ignore[arg-type]  # one of them


def test_each_model_has_the_options_and_a_folder_of_its_own(folder: Path, tmp_path: Path) -> None:
    options = ServeOptions(
        models=(f"a={folder}", "org/b=demo"), kv_disk=tmp_path, max_seqs=3, keep_alive=5.0, port=1
    )
    made = options_by_name(options)
    assert [each.model for each in made.values()] == [folder, Path("demo")]
    assert [each.served_model_name for each in made.values()] == ["a", "org/b"]
    assert [each.kv_disk for each in made.values()] == [tmp_path / "a", tmp_path / "org--b"]
    assert {(each.max_seqs, each.models, each.keep_alive) for each in made.values()} == {(3, (), None)}


def test_a_dry_run_shows_each_model(folder: Path) -> None:
    code, output = said("--model", f"a={folder}", "--model", "b=demo", "--kv-memory", "64MiB")
    assert code == 0, output
    assert output.count("parameters") == 2


def test_the_file_has_a_list_of_models(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"models:\n- a={folder}\n- b=demo\nkv-memory: 64MiB\n")
    code, output = said("--config", str(file))
    assert code == 0, output
    assert output.count("parameters") == 2
