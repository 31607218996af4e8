"""PEFT adapter folders made by PEFT itself, on tiny random Hugging Face models. B is not zero, so the
adapters have an effect.

    base = tiny_config()                              # or a model's folder, or any Hugging Face config
    make_adapter_folder(tmp_path / "poet", base, rank=16, targets=("q_proj", "down_proj"), seed=3)
    read_adapter(tmp_path / "poet", lora_shapes(base))
"""

import atexit
import copy
import json
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from content import Base, Content, content_of
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from personae.lora.peft_names import CONFIG_FILE
from personae.lora.shapes import LoraShapes
from personae.lora.sites import sites

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def tiny_config(**changes: Any) -> PretrainedConfig:
    """A Llama of 2 layers, hidden 32, intermediate 48, 4 heads, 2 key-value heads; `changes` override."""
    fields: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return LlamaConfig(**(fields | changes))


def lora_shapes(base: Base) -> LoraShapes:
    """The shapes that an adapter of this base must have, from its config alone."""
    config = AutoConfig.from_pretrained(base) if isinstance(base, Path) else base
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = heads * head_dim, config.num_key_value_heads * head_dim
    return LoraShapes(
        config.num_hidden_layers,
        sites(
            {
                "q": (hidden, queries),
                "k": (hidden, keys),
                "v": (hidden, keys),
                "o": (queries, hidden),
                "gate": (hidden, inner),
                "up": (hidden, inner),
                "down": (inner, hidden),
            },
            merged=config.model_type == "phi3",
        ),
    )


def make_adapter(
    base: Base,
    *,
    rank: int = 8,
    targets: Sequence[str] | str = ALL_TARGETS,
    alpha: float | None = None,
    rslora: bool = False,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    layers: Sequence[int] | None = None,
    scale: float = 0.1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> PeftModel:
    """A PEFT model with a random adapter, ready to run. `alpha` is 2 * rank by default.

    A row of A has about unit length, and B's entries have a deviation of `scale` / sqrt(rank), so that the
    update is about alpha / rank * `scale` of its input at any rank. `options` are passed to LoraConfig. The
    caller's random state is not changed.
    """
    with warnings.catch_warnings(), torch.random.fork_rng():
        # transformers warns of its own deprecated properties when PEFT walks over them.
        warnings.simplefilter("ignore")
        model = copy.deepcopy(_model(content_of(base)))
        torch.manual_seed(0)  # what PEFT draws is the same, whether the model was loaded or not
        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank if alpha is None else alpha,
            target_modules=targets if isinstance(targets, str) else list(targets),
            use_rslora=rslora,
            rank_pattern=dict(rank_pattern or {}),
            alpha_pattern=dict(alpha_pattern or {}),
            layers_to_transform=None if layers is None else list(layers),
            task_type="CAUSAL_LM",
            **options,
        )
        peft_model = get_peft_model(model, config)
        torch.manual_seed(seed)
        for name, parameter in peft_model.named_parameters():
            if ".lora_A." in name:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            elif ".lora_B." in name and parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5)
            if ".lora_" in name:
                parameter.data = parameter.data.to(dtype)
        return peft_model.eval()


@lru_cache(maxsize=2)
def _model(content: Content) -> Any:
    """The base's Hugging Face model. A base given as a config has the same weights every time."""
    if isinstance(content.base, Path):
        return AutoModelForCausalLM.from_pretrained(content.base, dtype=torch.float32)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(content.base, dtype=torch.float32)


def set_config(folder: Path, **fields: Any) -> None:
    """Change fields of an adapter folder's config."""
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def make_adapter_folder(path: Path, base: Base, **options: Any) -> Path:
    """Save `make_adapter(base, **options)` at `path` as PEFT does. Returns the path.

    PEFT makes an adapter once in this process. For the same base and options its files are copied.
    """
    key = (content_of(base), repr(options))
    if key not in _SAVED:
        _SAVED[key] = _saved(base, options)
    shutil.copytree(_SAVED[key], path, dirs_exist_ok=True, copy_function=shutil.copyfile)
    return path


_SAVED: dict[tuple[Content, str], Path] = {}
"""Folders with the files of an adapter, by its base and its options."""


@cache
def _folder() -> Path:
    """What is in it is removed with the process."""
    path = Path(tempfile.mkdtemp(prefix="personae-adapters-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _saved(base: Base, options: dict[str, Any]) -> Path:
    path = Path(tempfile.mkdtemp(dir=_folder()))
    model = make_adapter(base, **options)
    with warnings.catch_warnings():
        # PEFT warns when it cannot ask the hub about a base that has no name.
        warnings.simplefilter("ignore")
        model.save_pretrained(path)
    return path


# Eight adapters that differ in everything that may differ: `make_zoo(path, base)`.
ZOO: dict[str, dict[str, Any]] = {
    "rank-1": {"rank": 1, "seed": 1},
    "rank-8-attention": {"rank": 8, "targets": ("q_proj", "k_proj", "v_proj", "o_proj"), "seed": 2},
    "rank-16-mlp": {
        "rank": 16,
        "targets": ("gate_proj", "up_proj", "down_proj"),
        "alpha": 8,
        "scale": 0.5,
        "seed": 3,
    },
    "rank-64": {"rank": 64, "seed": 4},
    "rslora": {"rank": 13, "rslora": True, "alpha": 11, "seed": 5},
    "rank-pattern": {
        "rank": 4,
        "rank_pattern": {"layers.0.self_attn.q_proj": 24, "down_proj": 2, r".*\.1\.mlp\.(gate|up)_proj": 9},
        "seed": 6,
    },
    "alpha-pattern": {
        "rank": 8,
        "targets": ("q_proj", "v_proj", "up_proj"),
        "rank_pattern": {"v_proj": 5},
        "alpha_pattern": {"v_proj": 3, "^model.layers.1.self_attn.q_proj": 20},
        "rslora": True,
        "seed": 7,
    },
    "last-layer": {"rank": 32, "targets": ("o_proj", "down_proj"), "layers": (1,), "seed": 8},
}


def make_zoo(path: Path, base: Base, names: Iterable[str | None] = ZOO) -> dict[str, Path]:
    """The folders, below `path`, of these adapters of the zoo, by name. None, the base, has none."""
    return {name: make_adapter_folder(path / name, base, **ZOO[name]) for name in names if name is not None}
