"""Two halves of a step, of which one computes while the other is exchanged (two-batch overlap)."""

from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
from engine_harness import EngineHarness
from family_models import make_family_folder
from shared_model import EVERY_KIND, ON_EXPERTS, adapters_of, same_answers
from tiny_models import model_folder

from personae.engine.parallel import shared_file
from personae.engine.parallel.process_groups import Library
from personae.engine.parallel.two_batches import TwoBatches
from personae.engine.worker import runner

# PEFT warns that rank_pattern's key for experts matches no module, and then applies it to the parameter.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")


@pytest.fixture(autouse=True)
def _small_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of two tokens have halves too."""
    monkeypatch.setattr(runner, "PART_TOKENS", 1)


EACH_LIBRARY = pytest.mark.parametrize("library", [None, "gloo"])


@EACH_LIBRARY
@pytest.mark.parametrize(
    ("size", "groups", "attention"),
    [(2, 1, 0), (4, 2, 0), (2, 2, 2), (2, 1, 1), (4, 2, 2)],  # whole attention from the third on
)
def test_base_and_adapters_on_experts_answer_as_in_one_process(
    size: int, groups: int, attention: int, library: Library | None, tmp_path: Path
) -> None:
    base = model_folder("qwen3_moe", num_experts=8, num_key_value_heads=2)
    made = adapters_of(base, tmp_path, ON_EXPERTS)
    options: dict[str, Any] = {"expert_groups": groups, "attention_ranks": attention, "library": library}
    same_answers(base, size, made, two_batches=True, tokens=64, **options)


@pytest.mark.parametrize("attention", [0, 1])
def test_adapters_of_every_kind_answer_as_in_one_process(attention: int, tmp_path: Path) -> None:
    base = model_folder("llama", intermediate_size=128)
    made = adapters_of(base, tmp_path, EVERY_KIND)
    same_answers(base, 2, made, attention_ranks=attention, two_batches=True)


@EACH_LIBRARY
@pytest.mark.parametrize("case", ["deepseek_v3", "qwen3_next", "granitemoehybrid, Mamba"])
def test_a_row_in_both_halves_reads_the_keys_and_states_of_its_first(
    case: str, library: Library | None, tmp_path: Path
) -> None:
    base = make_family_folder(tmp_path / "model", case)
    same_answers(base, 2, attention_ranks=2, two_batches=True, library=library)


def test_halves_that_are_given_in_different_numbers_of_parts_stay_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = model_folder("qwen3_moe", num_experts=8)
    expected = _one_long_prompt(EngineHarness(folder))
    monkeypatch.setattr(shared_file, "SLOT_BYTES", 12 * 4 * 64)  # 12 rows: 13 and 12 are two parts and one
    for attention in (0, 1):
        made = EngineHarness(folder, ranks=2, shared=True, attention_ranks=attention, two_batches=True)
        assert _one_long_prompt(made) == expected


def _one_long_prompt(made: EngineHarness) -> list[int]:
    log = made.log("long", range(20, 45), max_tokens=8)
    return made.play([log])["long"].tokens


def test_a_step_of_few_tokens_has_no_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PART_TOKENS", 10)
    folder = model_folder("qwen3_moe", num_experts=8)
    made = EngineHarness(folder, ranks=2, shared=True, attention_ranks=1, two_batches=True)
    runs = 0

    def counted(*works: object) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal runs
        runs += 1
        return run(*works)  # type: ignore[arg-type, return-value]  # what it is called with

    halves = made.ranks[0].model.comm.two_batches
    assert halves is not None
    run = halves.run
    monkeypatch.setattr(halves, "run", counted)
    made.play([made.log("short", range(20, 39), max_tokens=4)])
    assert runs == 0
    made.play([made.log("long", range(50, 70), max_tokens=4)])
    assert runs == 1


def test_halves_run_one_at_a_time_in_turns_and_the_longer_one_to_its_end() -> None:
    halves, said, threads = TwoBatches(), list[str](), set[int]()

    def work(name: str, times: int) -> str:
        for number in range(times):
            threads.add(get_ident())
            said.append(f"{name}{number}")
            halves.switch()
        return name

    assert halves.run(lambda: work("a", 2), lambda: work("b", 4)) == ("a", "b")
    assert said == ["a0", "b0", "a1", "b1", "b2", "b3"]
    assert len(threads) == 2
    halves.switch()  # nothing happens when no halves run
    assert halves.now == 0


@pytest.mark.parametrize("failing", ["first", "second"])
def test_the_error_of_one_half_ends_both_and_the_next_step_runs(failing: str) -> None:
    halves = TwoBatches()

    def good() -> str:
        for _ in range(10):
            halves.switch()
        return "good"

    def bad() -> str:
        halves.switch()
        raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault"):
        halves.run(*((bad, good) if failing == "first" else (good, bad)))
    assert halves.run(good, good) == ("good", "good")
