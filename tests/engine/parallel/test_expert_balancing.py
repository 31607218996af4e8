"""Experts move between ranks while they serve, and nobody's answer changes. The ranks are threads here;
`test_expert_processes.py` has processes."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import EngineHarness
from family_models import make_family_folder
from shared_model import ON_EXPERTS, adapters_of, answers
from tiny_models import model_folder

from personae.engine.layers.moe import MoE
from personae.engine.parallel.expert_placement import ExpertGroups, balanced, first_placement, imbalance
from personae.engine.worker import expert_balancing

# PEFT warns that rank_pattern's key for experts matches no module, and then applies it to the parameter.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_balancing, "BALANCE_STEPS", 4)


def experts_of(made: EngineHarness) -> list[MoE]:
    """The first rank's mixtures of experts."""
    return [layer.mlp for layer in made.ranks[0].model.layers if isinstance(layer.mlp, MoE)]


def balanced_answers(
    base: Path, size: int, adapters: dict[str, Path] | None = None, *, tokens: int = 64, **options: Any
) -> EngineHarness:
    """Ranks whose experts have moved while they answered as one process does."""
    quantize = options.get("quantize")
    alone = EngineHarness(base, adapters, num_pages=64, quantize=quantize)
    together = EngineHarness(base, adapters, num_pages=64, ranks=size, shared=True, **options)
    assert answers(together, tokens) == answers(alone, tokens)
    assert together.scheduler.counters.expert_moves
    return together


@pytest.mark.parametrize(
    ("size", "groups", "stages", "spare"),
    [(2, 2, 1, 0), (4, 4, 1, 1), (4, 2, 1, 1), (2, 2, 2, 1)],  # whole experts; cut in each group; in stages
)
def test_tokens_of_base_and_adapters_are_equal_before_while_and_after_experts_move(
    size: int, groups: int, stages: int, spare: int, tmp_path: Path
) -> None:
    base = model_folder("qwen3_moe", num_experts=8, num_key_value_heads=2)
    adapters = adapters_of(base, tmp_path, ON_EXPERTS)
    made = balanced_answers(base, size, adapters, stages=stages, expert_groups=groups, spare=spare)
    first = first_placement(8, ExpertGroups(groups, spare))
    for block in experts_of(made):
        assert block.slots is not None
        assert block.slots.placement != first
        if spare:
            assert any(len(set(own)) > 8 // groups for own in block.slots.placement)


@pytest.mark.parametrize(
    ("case", "quantize"),
    [("glm4_moe", None), ("gpt_oss", None), ("qwen2_moe", "int8")],  # shared experts and groups; biases
)
def test_experts_with_biases_quantized_and_beside_shared_ones_move(
    case: str, quantize: str | None, tmp_path: Path
) -> None:
    base = make_family_folder(tmp_path / "model", case)
    balanced_answers(base, 2, expert_groups=2, spare=1, quantize=quantize, tokens=30)


@pytest.mark.parametrize("case", ["qwen2_moe", "glm4_moe"])
def test_the_loads_of_a_models_layers_become_even(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_balancing, "BALANCE_STEPS", 10**9)  # all is counted, and nothing moves
    made = EngineHarness(
        make_family_folder(tmp_path / "model", case), ranks=2, shared=True, expert_groups=2, spare=1
    )
    answers(made, 40)
    for block in experts_of(made):
        assert block.loads is not None
        assert block.slots is not None
        loads = block.loads.tolist()
        assert sum(loads) >= 2 * block.spec.routing.top_k * 39
        assert imbalance(loads, balanced(loads, block.slots.placement)) <= 1.1


def test_experts_stay_where_they_are_with_a_warning_if_the_models_files_have_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = Path(shutil.copytree(model_folder("qwen3_moe", num_experts=8), tmp_path / "model"))
    alone = EngineHarness(base)
    made = EngineHarness(base, ranks=2, shared=True, expert_groups=2, spare=1)
    (base / "model.safetensors").touch()
    with caplog.at_level(logging.WARNING, "personae.engine"):
        assert answers(made, 30) == answers(alone, 30)
    assert [record.message for record in caplog.records] == [
        f"the experts stay on the ranks where they are: {base} has changed since the model was loaded"
    ]
    assert not made.scheduler.counters.expert_moves


def test_nothing_is_counted_or_kept_where_experts_stay() -> None:
    made = EngineHarness(model_folder("mixtral"), ranks=2, shared=True, expert_groups=2)
    answers(made, 10)
    assert all(block.loads is None for block in experts_of(made))
    assert made.ranks[0].model.files is None
    assert made.engine.worker.expert_balance is None


def test_spare_slots_are_counted_in_the_models_memory() -> None:
    sizes = [
        EngineHarness(model_folder("mixtral"), ranks=2, shared=True, expert_groups=2, spare=spare)
        .ranks[0]
        .model.nbytes
        for spare in (0, 1)
    ]
    block = experts_of(EngineHarness(model_folder("mixtral")))[0]
    of_one = sum(
        tensor.nbytes
        for name, tensor in block.tensors()
        if ".experts.0." in name and isinstance(tensor, torch.Tensor)
    )
    layers = EngineHarness(model_folder("mixtral")).ranks[0].model.config.layers
    assert sizes[1] - sizes[0] == layers * of_one
