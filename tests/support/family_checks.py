"""What is checked of every family: a tiny random model against transformers, and adapters on it against
PEFT."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from engine_harness import EngineHarness
from family_models import make_family_folder
from hf import hf_greedy, hf_logits, hf_model, relative_error
from paged import PagedSequences
from peft import PeftModel
from tiny_adapters import make_adapter
from tiny_models import VOCAB

from personae.engine.config import ModelConfig
from personae.engine.loader import load_model
from personae.engine.lora_shapes import lora_shapes
from personae.lora.peft import read_adapter

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class FamilyReport:
    """`logits`: the largest relative error over 100 tokens; `chunked`, `packed`: that of chunks and of a
    mixed batch to transformers. `greedy`: 64 tokens are the same; `engine`: so are those of the base and of
    adapters in one batch, with a cached prefix and with preemption."""

    logits: float
    chunked: float
    packed: float
    greedy: bool
    engine: bool
    preempted: bool

    @property
    def passed(self) -> bool:
        """Whether all of it is as it must be."""
        errors = max(self.logits, self.chunked, self.packed)
        return errors < 1e-4 and self.greedy and self.engine and self.preempted

    def __str__(self) -> str:
        return "  ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))


def targets(config: ModelConfig) -> str:
    """An expression for all linear modules that adapters may change. PEFT takes a list of names with
    gate_proj as one of experts, and rewrites it."""
    layers: dict[str, list[str]] = {}
    for index, layer in enumerate(config.layer_specs):
        for key, site in layer.lora_sites(config.hidden_size).items():
            if key in config.lora_sites and site.experts == 1 and key != "router":
                layers.setdefault(re.escape(site.path), []).append(str(index))
    return "|".join(rf"model\.layers\.({'|'.join(own)})\.{path}" for path, own in sorted(layers.items()))


def adapted(folder: Path, config: ModelConfig) -> Iterator[tuple[str, PeftModel]]:
    """The model with each of two adapters, which change all modules, and their names."""
    options: dict[str, dict[str, Any]] = {
        "one": {"rank": 3, "targets": targets(config)},
        "two": {"rank": 12, "targets": targets(config)},
    }
    if any(site.experts > 1 for site in config.lora_sites.values()):
        wide = "gate_up_proj" if "expert_gate" in config.lora_sites else "up_proj"
        options["two"]["target_parameters"] = [f"experts.{wide}", "experts.down_proj"]
    for name, each in options.items():
        # For a mixture of experts PEFT would take LoRA away from dense layers and shared experts. It refuses
        # out_proj of some families with Mamba, because kernels that are not used here skip the module.
        with (
            patch("peft.utils.transformers_weight_conversion._convert_peft_config_moe"),
            patch("peft.tuners.tuners_utils._check_lora_target_modules_mamba"),
        ):
            yield name, make_adapter(folder, seed=each["rank"], scale=0.3, **each)


def check_family(case: str, path: Path) -> FamilyReport:
    """Makes the model of a case below `path` and compares."""
    folder = make_family_folder(path / "base", case)
    return check_checkpoint(folder, folder, path)


def check_checkpoint(folder: Path, plain: Path, path: Path) -> FamilyReport:
    """Compares a checkpoint, a folder or a GGUF file, with transformers' model of `plain`, a folder with the
    same weights. Adapters are written below `path`."""
    model, tokens = hf_model(plain), random.Random(1).choices(range(VOCAB), k=100)
    truth = hf_logits(model, tokens)
    decoder = load_model(folder, device=CPU, dtype="float32")
    hidden, _ = PagedSequences(decoder, page_size=8).forward({"a": tokens})
    logits = max(map(relative_error, decoder.logits(hidden), truth))
    parts = PagedSequences(decoder, seed=2)
    for first in range(0, 99, 33):
        last = parts.step({"a": tokens[first : first + 33]})["a"]
    mixed = PagedSequences(decoder, seed=3)
    mixed.step({"a": tokens[:60], "b": tokens[:7]})
    both = mixed.step({"b": tokens[7:50], "a": tokens[60:61], "c": tokens[:1]})
    ends = {"a": 60, "b": 49, "c": 0}
    greedy = PagedSequences(decoder).greedy("a", tokens[:23], 64)
    engine, preempted = _engine(folder, plain, path, decoder.config)
    return FamilyReport(
        logits,
        relative_error(last, truth[98]),
        max(relative_error(both[name], truth[end]) for name, end in ends.items()),
        greedy == hf_greedy(model, tokens[:23], 64),
        engine,
        preempted,
    )


def _engine(folder: Path, plain: Path, path: Path, config: ModelConfig) -> tuple[bool, bool]:
    """The base and two adapters, which change all modules, in one batch; then again, with a prefix from the
    cache. The memory is too small for all of them. Where the base has no adapters, all three are of it."""
    prompts = {name: random.Random(len(name)).choices(range(VOCAB), k=40) for name in ("one", "two", "base")}
    base, adapters = hf_model(plain), {}
    truth = {name: hf_greedy(base, prompt, 24) for name, prompt in prompts.items()}
    for name, model in adapted(plain, config) if config.unadaptable is None else ():
        adapters[name] = path / name
        model.save_pretrained(adapters[name])
        truth[name] = hf_greedy(model, prompts[name], 24)
    if adapters:
        shapes = lora_shapes(load_model(folder, device=CPU))
        read = {key for name in adapters for _, key in read_adapter(adapters[name], shapes).pairs}
        assert {*config.lora_sites} - read <= {"router"}, read
    harness = EngineHarness(folder, adapters, num_pages=11, page_size=16)
    for again in ("", "again "):
        logs = [
            harness.log(f"{again}{name}", prompt, name if name in adapters else None, max_tokens=24)
            for name, prompt in prompts.items()
        ]
        played = harness.play(logs)
        if any(played[f"{again}{name}"].tokens != tokens for name, tokens in truth.items()):
            return False, False
    return True, harness.scheduler.counters.preemptions > 0
