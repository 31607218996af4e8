"""`personae serve --config`: the same options as on the command line, from a YAML file."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from personae.api.cli import app
from personae.api.options import ServeOptions


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """The options that the command would serve with."""
    calls: list[ServeOptions] = []
    monkeypatch.setattr("personae.api.commands.serve.run", lambda options, start_up: calls.append(options))
    return calls


def serve(folder: Path, text: str, *more: str) -> tuple[int, str]:
    file = folder / "serve.yaml"
    file.write_text(text, encoding="utf-8")
    result = CliRunner().invoke(app, ["serve", "--config", str(file), *more])
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_a_file_has_every_kind_of_option(served: list[ServeOptions], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    text = f"""
        model: demo
        served-model-name: [one, two]
        adapters: {tmp_path / "a"}
        max_seqs: 3
        kv-memory: 2GiB
        adapter-memory: 4096
        cuda-graphs: false
        jump-forward: true
        default-strict: true
        request-timeout: 2.5
        seed:
        """
    assert serve(tmp_path, text)[0] == 0
    assert served == [
        ServeOptions(
            Path("demo"),
            served_model_name=("one", "two"),
            adapters=(tmp_path / "a",),
            max_seqs=3,
            kv_memory=2**31,
            adapter_memory=4096,
            cuda_graphs=False,
            jump_forward=True,
            default_strict=True,
            request_timeout=2.5,
        )
    ]


def test_the_command_line_overrides_the_file(served: list[ServeOptions], tmp_path: Path) -> None:
    text = "max-seqs: 3\ncuda-graphs: false\nserved-model-name: [one, two]\n"
    assert serve(tmp_path, text, "--max-seqs", "4", "--cuda-graphs", "--served-model-name", "three")[0] == 0
    assert served == [ServeOptions(max_seqs=4, served_model_name=("three",))]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-seqs: 0", "'--max-seqs': Input should be greater than or equal to 1"),
        ("max-seqs: 3.5", "'--max-seqs': Input should be a valid integer"),
        ("max-seqs: true", "'--max-seqs': Input should be a valid integer"),
        ("kv-memory: lots", "'lots' is not a size"),
        ("device: tpu", "'--device'"),
        ("cuda-graphs: maybe", "'--cuda-graphs'"),
        ("root-path: llm", "write it as /llm"),
        ("model: no/such/model", "'no/such/model' does not exist"),
        ("adapters: [no-such-folder]", "'no-such-folder' does not exist"),
        ("max-seq: 3", "there is no option 'max-seq'. Did you mean 'max-seqs'?"),
        ("max-num-seqs: 3", "Here it is --max-seqs."),
        ("config: other.yaml", "there is no option 'config'"),
        ("seed: [1, 2]", "'seed' takes one value"),
        ("seed: {a: 1}", "cannot be read"),
        ("- seed", "cannot be read"),
        ("seed: [", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_by_name(
    text: str, said: str, served: list[ServeOptions], tmp_path: Path
) -> None:
    code, output = serve(tmp_path, text)
    assert code == 2
    assert said in output
    assert "serve.yaml" in output.replace(" ", "")
    assert served == []
