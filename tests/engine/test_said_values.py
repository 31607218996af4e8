"""Errors show the values of a model's files as JSON, which is what these files are."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_model_folder

from personae import engine
from personae.engine.loader import load_model
from personae.errors import ModelLoadError

SOURCES = sorted(Path(engine.__path__[0]).rglob("*.py"))
INSIDE = "scheduling"  # what goes wrong there is no user's


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("layer_types", {"a": None}, '{"a": null}'),
        ("layer_types", [{"kind": True}, None], '[{"kind": true}, null]'),
        ("layer_types", ["mamba", "mamba"], '["mamba", "mamba"]'),
        ("architectures", [None], "[null]"),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [None, True]}, "[null, true]"),
        ("quantization_config", {"quant_method": "gptq", "bits": None, "sym": None, "a": {"b": False}}, "a"),
        ("rope_scaling", {"rope_type": "x"}, '"x"'),
    ],
)
def test_a_value_is_shown_as_the_file_has_it(field: str, value: Any, said: str, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "qwen3", **{field: value})
    with pytest.raises(ModelLoadError, match=field.partition("_")[0]) as refused:
        load_model(folder, device=torch.device("cpu"))
    assert said in str(refused.value)
    assert not {"None", "True", "False", "'"} & {*str(refused.value).replace("'", " ' ").split()}


def test_no_error_of_the_engine_has_pythons_spelling() -> None:
    """Neither f"{value!r}" nor repr(value) in what is raised."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in SOURCES
        if INSIDE not in path.parts
        for raised in ast.walk(ast.parse(path.read_text()))
        if isinstance(raised, ast.Raise | ast.Return)
        for node in ast.walk(raised)
        if (isinstance(node, ast.FormattedValue) and node.conversion == ord("r"))
        or (isinstance(raised, ast.Raise) and isinstance(node, ast.Name) and node.id == "repr")
    ]
    assert SOURCES
    assert found == []
