"""What a node checks before it starts an engine."""

from pathlib import Path

import pytest

import personae
from personae.actors.cluster.node import model_digest, refusal


def write(folder: Path, weights: bytes = b"w" * (20 * 2**20)) -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    (folder / "tokenizer.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_node_with_the_same_version_and_model_refuses_nothing(tmp_path) -> None:
    here, model = write(tmp_path / "here"), write(tmp_path / "model")
    (model / "README.md").write_text("what is no weight does not matter")
    assert refusal(personae.__version__, str(model), model_digest(here)) is None


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_other_weights_another_tokenizer_or_another_configuration_are_refused(tmp_path, name: str) -> None:
    digest = model_digest(write(tmp_path / "here"))
    model = write(tmp_path / "model")
    (model / name).write_bytes((model / name).read_bytes()[:-1] + b"x")
    reason = refusal(personae.__version__, str(model), digest)
    assert reason == f"the model at {model} is not the frontend's: it has other weights or another tokenizer."


def test_training_that_changes_a_large_file_everywhere_changes_its_digest(tmp_path) -> None:
    here = write(tmp_path / "here", bytes(64 * 2**20))
    model = write(tmp_path / "model", b"\0" * (8 * 2**20) + b"\1" * (8 * 2**20) + b"\0" * (48 * 2**20))
    assert model_digest(here) != model_digest(model)


def test_a_model_that_is_not_there_is_refused_with_its_path(tmp_path) -> None:
    reason = refusal(personae.__version__, str(tmp_path / "no"), "")
    assert reason == f"there is no model at {tmp_path / 'no'}; every node needs it under the same path."
    (tmp_path / "empty").mkdir()
    assert "can't be read: no model at" in str(refusal(personae.__version__, str(tmp_path / "empty"), ""))


def test_another_version_is_refused_before_the_model_is_looked_at(tmp_path) -> None:
    reason = refusal("9.9", str(tmp_path / "no"), "")
    assert reason == f"it has Personae {personae.__version__}, the frontend has 9.9; install the same."


def test_a_gguf_file_is_known_by_its_content_not_by_its_name(tmp_path) -> None:
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    one.write_bytes(b"GGUF" * 100)
    two.write_bytes(b"GGUF" * 100)
    assert model_digest(one) == model_digest(two)
    two.write_bytes(b"GGUF" * 101)
    assert model_digest(one) != model_digest(two)
