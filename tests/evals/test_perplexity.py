"""The perplexity of a GGUF file, through Personae and through transformers."""

from pathlib import Path

import anyio
import pytest
from gguf import GGMLQuantizationType as Type
from gguf_files import write_gguf
from tiny_models import model_folder

from personae.evals.perplexity import through_personae, through_transformers, windows


def test_both_score_the_same_tokens_the_same(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", model_folder("llama"), Type.Q4_1)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 12)
    parts = windows(model, [text, text], 48)
    assert len(parts) > 2
    assert all(len(ids) == 48 for ids in parts)
    ours = anyio.run(through_personae, model, "float32", parts)
    assert ours == pytest.approx(through_transformers(model, parts), rel=1e-5)
    rounded = anyio.run(through_personae, model, "bfloat16", parts)
    assert rounded == pytest.approx(ours, rel=1e-2)
    assert rounded != ours
