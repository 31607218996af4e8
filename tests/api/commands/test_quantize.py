"""`personae quantize`: what it refuses, and with llm-compressor what it makes."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import DATA
from tiny_models import model_folder
from typer.testing import CliRunner

from personae.api.cli import app
from personae.engine.loader import load_model


def quantize(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    return result.exit_code, " ".join(f"{result.output} {result.exception!r}".split())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog " * 200)
    return file


def test_without_llm_compressor_it_says_what_to_install(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llmcompressor", None)
    code, said = quantize(model_folder("llama"), tmp_path / "out", "--text", text)
    assert code == 2
    assert "needs llm-compressor" in said
    assert "pip install llmcompressor" in said
    assert not (tmp_path / "out").exists()


def test_what_is_no_plain_model_is_refused_by_name(text: Path, tmp_path: Path) -> None:
    assert "is quantized already" in quantize(DATA / "gptq-sym", tmp_path / "out", "--text", text)[1]
    assert "no folder with a config.json" in quantize(tmp_path, tmp_path / "out", "--text", text)[1]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    code, said = quantize(model_folder("llama"), tmp_path / "full", "--text", text)
    assert code == 2
    assert "full exists already" in said


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl", "{}", "a.jsonl, line 1: expected an object with text"),
        ("a.jsonl", '{"text": "a"}\n[1]', "a.jsonl, line 2: expected an object with text"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "a.jsonl, line 1: expected"),
        ("a.txt", "short", "fewer than a window of 512"),
        ("missing.txt", None, "missing.txt cannot be read"),
    ],
)
def test_texts_that_cannot_be_used_are_named(
    name: str, content: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from personae.api.commands import quantize as command

    monkeypatch.setattr(command, "_library", lambda: (None,) * 4)
    if content is not None:
        (tmp_path / name).write_text(content)
    code, said = quantize(model_folder("llama"), tmp_path / "out", "--text", tmp_path / name)
    assert code == 2
    assert why in said


@pytest.mark.filterwarnings("ignore")  # the tool's own
@pytest.mark.skipif(find_spec("llmcompressor") is None, reason="needs llm-compressor")
def test_a_model_in_four_bits_is_served_in_its_bits(text: Path, tmp_path: Path) -> None:
    lines = tmp_path / "chat.jsonl"
    lines.write_text(json.dumps({"messages": [{"role": "user", "content": text.read_text()}]}))
    out = tmp_path / "out"
    arguments = ("--text", text, "--text", lines, "--windows", 4, "--width", 32)
    code, said = quantize(model_folder("llama"), out, *arguments)
    assert code == 0, said
    decoder = load_model(out, device=torch.device("cpu"))
    assert decoder.quantization == "pack-quantized"
