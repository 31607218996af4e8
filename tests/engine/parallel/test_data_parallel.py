"""Ranks that have sequences of their own and share the experts (data-parallel attention)."""

from pathlib import Path

import pytest
from engine_harness import EngineHarness
from family_models import make_family_folder
from shared_model import EVERY_KIND, ON_EXPERTS, adapters_of, answers, same_answers
from tiny_models import model_folder

from personae.engine.parallel.comm import SharedMemory
from personae.engine.parallel.process_groups import Library

# PEFT warns that rank_pattern's key for experts matches no module, and then applies it to the parameter.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
EACH_LIBRARY = pytest.mark.parametrize("library", [None, "gloo"])


@EACH_LIBRARY
def test_base_and_adapters_on_experts_answer_as_in_one_process(
    library: Library | None, tmp_path: Path
) -> None:
    base = model_folder("qwen3_moe", num_experts=8, num_key_value_heads=2)
    made = adapters_of(base, tmp_path, ON_EXPERTS)
    same_answers(base, 2, made, expert_groups=2, attention_ranks=2, tokens=64, library=library)


@EACH_LIBRARY
def test_latent_attention_that_ranks_cannot_cut_answers_as_in_one_process(
    library: Library | None, tmp_path: Path
) -> None:
    base = make_family_folder(tmp_path / "model", "deepseek_v3")
    targets = {"targets": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "down_proj"]}
    made = adapters_of(base, tmp_path, {"latent": {"rank": 4, "seed": 3, **targets}})
    same_answers(base, 2, made, expert_groups=2, attention_ranks=2, tokens=64, library=library)


@EACH_LIBRARY
@pytest.mark.parametrize("case", ["qwen3_next", "gemma4, experts"])  # states; norms after each sum
def test_other_kinds_of_attention_answer_as_in_one_process(
    case: str, library: Library | None, tmp_path: Path
) -> None:
    same_answers(
        make_family_folder(tmp_path / "model", case), 2, attention_ranks=2, tokens=10, library=library
    )


def test_experts_in_a_third_block_of_a_layer_are_divided_and_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("personae.engine.worker.expert_balancing.BALANCE_STEPS", 4)
    base = make_family_folder(tmp_path / "model", "gemma4, experts")
    options = {"ranks": 2, "shared": True, "expert_groups": 2, "spare": 1, "attention_ranks": 2}
    made = EngineHarness(base, **options)  # type: ignore[arg-type]  # its own options
    assert answers(made, 40) == answers(EngineHarness(base), 40)
    first, second = ({name for name, _ in rank.model.tensors() if ".experts." in name} for rank in made.ranks)
    assert first
    assert not first & second


def test_adapters_of_every_kind_answer_as_in_one_process(tmp_path: Path) -> None:
    base = model_folder("qwen2", vocab_size=511)
    same_answers(base, 2, adapters_of(base, tmp_path, EVERY_KIND), attention_ranks=2)


def test_a_step_exchanges_what_the_documentation_says_and_its_pages_are_on_all_ranks() -> None:
    made = EngineHarness(
        model_folder("qwen3_moe", num_experts=8), ranks=2, shared=True, expert_groups=2, attention_ranks=2
    )
    comms = [rank.model.comm for rank in made.ranks]
    assert all(isinstance(comm, SharedMemory) for comm in comms)
    config = made.ranks[0].model.whole
    before = [comm.given for comm in comms]  # type: ignore[attr-defined]  # see above
    made.play([made.log(f"{n}", range(20 + n, 29 + 2 * n), max_tokens=1) for n in range(3)])
    tokens, sampled = sum(9 + n for n in range(3)), 3
    each = 4 * (tokens * (config.layers + 1) * config.hidden_size + sampled * config.vocab_size // 2)
    assert [comm.given - at for comm, at in zip(comms, before, strict=True)] == [each] * 2  # type: ignore[attr-defined]  # see above
    assert [rank.kv.num_pages for rank in made.ranks] == [128, 128]
    for rank in made.ranks:
        written = ~next(iter(rank.kv.groups.values())).isnan()
        assert written.any()


def test_a_turn_goes_where_its_conversation_is_cached() -> None:
    made = EngineHarness(model_folder("qwen3_moe"), ranks=2, shared=True, attention_ranks=2)
    alone = EngineHarness(model_folder("qwen3_moe"))
    for engine in (made, alone):
        engine.play([engine.log(f"{n}", range(5 + n, 90 + n)) for n in range(4)])
    turns = [[engine.log(f"turn {n}", range(5 + n, 95 + n)) for n in range(4)] for engine in (made, alone)]
    played, expected = made.play(turns[0]), alone.play(turns[1])
    assert played == expected
    assert all(each.cached == 85 for each in played.values())


@EACH_LIBRARY
def test_experts_that_move_leave_answers_as_they_were(
    library: Library | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("personae.engine.worker.expert_balancing.BALANCE_STEPS", 4)
    base = model_folder("qwen3_moe", num_experts=8)
    options = {"ranks": 2, "shared": True, "expert_groups": 2, "spare": 1, "attention_ranks": 2}
    made = EngineHarness(base, library=library, **options)  # type: ignore[arg-type]  # its own options
    assert answers(made, 40) == answers(EngineHarness(base), 40)
    assert made.scheduler.counters.expert_moves
