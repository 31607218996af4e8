"""Ranks that have attention and sequences, and other ranks that have the MLPs and experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import EngineHarness, comms_of
from family_models import make_family_folder
from shared_model import EVERY_KIND, ON_EXPERTS, adapters_of, answers, same_answers
from tiny_adapters import make_adapter_folder
from tiny_models import model_folder

from personae.engine.loader import load_model
from personae.engine.parallel.comm import SharedMemory
from personae.engine.parallel.process_groups import Library
from personae.errors import LoadError
from personae.lora.peft import read_adapter

# PEFT warns that rank_pattern's key for experts matches no module, and then applies it to the parameter.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
CPU = torch.device("cpu")


EACH_LIBRARY = pytest.mark.parametrize("library", [None, "gloo"])


@EACH_LIBRARY
@pytest.mark.parametrize(
    ("attention", "size", "groups"),
    [(1, 2, 1), (1, 3, 2), (2, 3, 1), (2, 4, 2), (1, 5, 2)],  # the last: groups that cut their experts
)
def test_base_and_adapters_on_experts_answer_as_in_one_process(
    attention: int, size: int, groups: int, library: Library | None, tmp_path: Path
) -> None:
    base = model_folder("qwen3_moe", num_experts=8, num_key_value_heads=2)
    made = adapters_of(base, tmp_path, ON_EXPERTS)
    options: dict[str, Any] = {"expert_groups": groups, "library": library}
    same_answers(base, size, made, attention_ranks=attention, tokens=64, **options)


def test_adapters_of_every_kind_answer_as_in_one_process(tmp_path: Path) -> None:
    base = model_folder("qwen2", vocab_size=511)
    same_answers(base, 4, adapters_of(base, tmp_path, EVERY_KIND), attention_ranks=2)


@pytest.mark.parametrize(
    "case",
    [
        "deepseek_v3",  # latent attention, a first layer without experts
        "qwen3_next",  # states, shared experts
        "gemma4",  # norms after each half, embeddings for each layer
        "cohere",  # both halves of a layer in parallel
        "granitemoehybrid, Mamba",
    ],
)
def test_other_kinds_of_layers_answer_as_in_one_process(case: str, tmp_path: Path) -> None:
    same_answers(make_family_folder(tmp_path / "model", case), 3, attention_ranks=1, tokens=20)


def test_inputs_that_are_rounded_are_rounded_by_the_largest_of_a_whole_row() -> None:
    base = model_folder("llama", intermediate_size=128)
    same_answers(base, 3, attention_ranks=1, quantize="fp8", tokens=64)


def test_each_kind_of_rank_has_its_own_weights_and_pages_and_no_others(tmp_path: Path) -> None:
    folder = model_folder("qwen3_moe", num_experts=8)
    comms = comms_of(3, 1, 2, attention_ranks=1)
    attention, *experts = (dict(load_model(folder, device=CPU, comm=comm).tensors()) for comm in comms)
    assert any("self_attn" in name for name in attention)
    assert not any(".mlp." in name for name in attention)
    for own in experts:
        assert any(".mlp.experts." in name for name in own)
        assert not any("self_attn" in name for name in own)
    made = EngineHarness(folder, ranks=3, shared=True, expert_groups=2, attention_ranks=1)
    assert [rank.kv.page_bytes > 0 for rank in made.ranks] == [True, False, False]
    adapter = read_adapter(make_adapter_folder(tmp_path / "adapter", folder), made.shapes)
    for rank in made.ranks:  # those without pages have none to lend
        assert rank.short_of(adapter) == 0
        assert rank.recall(1) == ()


def test_a_step_exchanges_what_the_documentation_says() -> None:
    made = EngineHarness(
        model_folder("qwen3_moe", num_experts=8), ranks=4, shared=True, expert_groups=2, attention_ranks=2
    )
    comms = [rank.model.comm for rank in made.ranks]
    assert all(isinstance(comm, SharedMemory) for comm in comms)
    config = made.ranks[0].model.whole
    before = [comm.given for comm in comms]  # type: ignore[attr-defined]  # see above
    made.play([made.log(f"{n}", range(20 + n, 29 + 2 * n), max_tokens=1) for n in range(2)])
    lengths, sampled = (9, 10), 2
    tokens = sum(lengths)
    rows = [*(tokens + config.layers * own for own in lengths), *[tokens * (config.layers + 1)] * 2]
    each = [4 * (count * config.hidden_size + sampled * config.vocab_size // 4) for count in rows]
    given = [comm.given - at for comm, at in zip(comms, before, strict=True)]  # type: ignore[attr-defined]  # see above
    assert given == each


@EACH_LIBRARY
def test_experts_that_move_leave_answers_as_they_were(
    library: Library | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("personae.engine.worker.expert_balancing.BALANCE_STEPS", 4)
    base = model_folder("qwen3_moe", num_experts=8)
    options: dict[str, Any] = {"ranks": 3, "shared": True, "expert_groups": 2, "spare": 1}
    made = EngineHarness(base, attention_ranks=1, library=library, **options)
    assert answers(made, 40) == answers(EngineHarness(base), 40)
    assert made.scheduler.counters.expert_moves


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("gemma4, experts", "an MLP and experts beside it, whose results have norms of their own"),
        ("nemotron_h, latent experts", "experts of a narrower vector, which 2 ranks cannot share equally"),
        ("gemma3n", "an MLP whose gate is cut off at its mean, which 2 ranks cannot share equally"),
    ],
)
def test_layers_whose_halves_cannot_be_on_different_ranks_are_refused_by_their_kind(
    case: str, said: str, tmp_path: Path
) -> None:
    folder = make_family_folder(tmp_path / "model", case)
    for comm in comms_of(3, attention_ranks=1):
        with pytest.raises(LoadError, match=f"--attention-ranks 1 of 3: this model has .*{said}"):
            load_model(folder, device=CPU, comm=comm)
