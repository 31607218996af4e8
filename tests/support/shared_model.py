"""The answers of one batch, of a model in one process and of the same model on ranks."""

from pathlib import Path
from typing import Any

from engine_harness import EngineHarness, Played
from tiny_adapters import ZOO, make_adapter_folder

EVERY_KIND: dict[str, dict[str, Any]] = {
    "attention": ZOO["rank-8-attention"],
    "all": ZOO["rank-64"],
    "dora": {"rank": 8, "seed": 21, "use_dora": True},
    "lora-bias": {"rank": 4, "seed": 22, "lora_bias": True},
    "vocabulary": {"rank": 4, "seed": 23, "targets": ("o_proj", "embed_tokens", "lm_head"), "use_dora": True},
}
"""Adapters of every kind, as options of `make_adapter_folder`."""


_BOTH = ["experts.gate_up_proj", "experts.down_proj"]
ON_EXPERTS: dict[str, dict[str, Any]] = {
    "both": {"rank": 3, "scale": 0.5, "targets": ["q_proj"], "target_parameters": _BOTH},
    "gate_up": {"rank": 9, "scale": 0.5, "seed": 1, "targets": [], "target_parameters": _BOTH[:1]},
    "down": {"rank": 4, "scale": 0.5, "seed": 2, "targets": ["o_proj"], "target_parameters": _BOTH[1:]},
    "attention": {"rank": 5, "scale": 0.5, "seed": 3, "targets": ["q_proj", "v_proj"]},
}
"""Adapters of experts, and one of none."""


def adapters_of(base: Path, path: Path, made: dict[str, dict[str, Any]]) -> dict[str, Path]:
    """The folders of adapters that are made with these options of `make_adapter_folder`, by name."""
    return {name: make_adapter_folder(path / name, base, **options) for name, options in made.items()}


def answers(made: EngineHarness, tokens: int) -> dict[str, Played]:
    """So many tokens of the base and of each adapter in one batch, and drawn ones with log-probabilities."""
    logs = [made.log(name or "base", range(5, 30), name, max_tokens=tokens) for name in (None, *made.digests)]
    logs.append(made.log("drawn", range(6, 40), temperature=1.0, seed=3, max_tokens=20))
    return made.play(logs)


def same_answers(
    folder: Path,
    size: int,
    adapters: dict[str, Path] | None = None,
    *,
    stages: int = 1,
    expert_groups: int = 1,
    spare: int | None = None,
    attention_ranks: int = 0,
    tokens: int = 20,
    **options: Any,
) -> None:
    """Ranks, `size` in each stage, answer as one process does."""
    alone = EngineHarness(folder, adapters, num_pages=64, **options)
    together = EngineHarness(
        folder,
        adapters,
        num_pages=64,
        ranks=size,
        shared=True,
        stages=stages,
        expert_groups=expert_groups,
        spare=spare,
        attention_ranks=attention_ranks,
        **options,
    )
    assert answers(together, tokens) == answers(alone, tokens)
