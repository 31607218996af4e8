"""The tiny checkpoints of tests/data/checkpoints.tar.xz, which the tools themselves have quantized
(`tests/support/make_quantized.py`), and the same models with plain weights."""

import atexit
import json
import shutil
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from personae.engine.checkpoints.huggingface import Folder

DATA = Path(tempfile.mkdtemp(prefix="personae-checkpoints-"))
atexit.register(shutil.rmtree, DATA, ignore_errors=True)
with tarfile.open(Path(__file__).parents[1] / "data" / "checkpoints.tar.xz") as archive:
    archive.extractall(DATA, filter="data")
NAMES = sorted(folder.name for folder in DATA.iterdir())


@cache
def plain(name: str) -> Path:
    """The checkpoint's model in float32, for transformers. `test_quantized.py` proves its weights."""
    folder, path = Folder(DATA / name), Path(tempfile.mkdtemp(prefix="personae-tiny-"))
    stored = folder.tensors(folder.config())
    weights = {key: tensor.read().float().contiguous() for key, tensor in stored.items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((DATA / name / "config.json").read_text())
    del config["quantization_config"]
    for key in ("dtype", "torch_dtype"):
        config.pop(key, None)
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return path


def copied(name: str, path: Path, **quantization: Any) -> Path:
    """A copy of a checkpoint with changed keys of its `quantization_config`; ... removes one."""
    shutil.copytree(DATA / name, path)
    file = path / "config.json"
    config = json.loads(file.read_text())
    changed = config["quantization_config"] | quantization
    config["quantization_config"] = {key: value for key, value in changed.items() if value is not ...}
    file.write_text(json.dumps(config))
    return path
