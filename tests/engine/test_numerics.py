"""What tells engines apart that may compute other tokens."""

from pathlib import Path

from tiny_models import model_folder

from personae.actors.assembly import assemble
from personae.actors.options import EngineOptions
from personae.engine.numerics import weights_digest


def test_the_digest_follows_the_weights_and_not_the_folder_s_name(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(3_000_000))
    assert weights_digest(one) == weights_digest(two)
    data = bytearray(3_000_000)
    data[1_500_000:1_600_000] = b"x" * 100_000
    (two / "model.safetensors").write_bytes(data)
    assert weights_digest(one) != weights_digest(two)
    (two / "model.safetensors").write_bytes(bytes(3_000_001))
    assert weights_digest(one) != weights_digest(two)
    assert weights_digest(one / "model.safetensors") == weights_digest(one / "model.safetensors")


def test_an_engine_says_how_it_computes() -> None:
    folder = model_folder("qwen3")
    found = {
        dtype: assemble(EngineOptions(folder, device="cpu", dtype=dtype, kv_memory=2**22)).numerics
        for dtype in ("float32", "bfloat16")
    }
    assert found["float32"].dtype == "float32"
    assert found["float32"].weights == found["bfloat16"].weights == weights_digest(folder)
    assert found["float32"].differences(found["bfloat16"]) == ["dtype", "kv_dtype"]
    assert found["float32"].instructions
