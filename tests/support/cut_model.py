"""A model that has only the first layers of another: a draft model that needs no training."""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file


def cut_model(path: Path, folder: Path, layers: int, **overrides: Any) -> Path:
    """Write the first `layers` layers of the model in `folder`, and its tokenizer. `overrides` are fields of
    config.json. Returns the path."""
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    (path / "config.json").write_text(json.dumps(config | overrides))
    weights = load_file(folder / "model.safetensors")
    dropped = tuple(f"model.layers.{index}." for index in range(layers, 64))
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(dropped)}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(folder / name, path / name)
    return path
