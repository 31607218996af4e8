"""Experts that are whole on some ranks answer as one process does, with adapters on them."""

from pathlib import Path

import pytest
import torch
from engine_harness import EngineHarness, comms_of
from family_models import make_family_folder
from shared_model import ON_EXPERTS, adapters_of, same_answers
from tiny_models import model_folder

from personae.engine.loader import load_model
from personae.engine.parallel.comm import SharedMemory
from personae.errors import LoadError

# PEFT warns that rank_pattern's key for experts matches no module, and then applies it to the parameter.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("size", "groups", "stages"),
    [(2, 2, 1), (4, 4, 1), (4, 2, 1), (2, 2, 2)],  # whole experts; cut in each group; in stages
)
def test_base_and_adapters_on_experts_answer_as_in_one_process(
    size: int, groups: int, stages: int, tmp_path: Path
) -> None:
    base = model_folder("qwen3_moe", num_experts=8, num_key_value_heads=2)
    same_answers(
        base, size, adapters_of(base, tmp_path, ON_EXPERTS), stages=stages, expert_groups=groups, tokens=64
    )


@pytest.mark.parametrize(
    ("case", "quantize"),
    [("qwen2_moe", None), ("ernie4_5_moe", None), ("qwen2_moe", "int8")],  # shared experts, a correction
)
def test_shared_experts_and_quantized_ones_answer_as_in_one_process(
    case: str, quantize: str | None, tmp_path: Path
) -> None:
    same_answers(make_family_folder(tmp_path / "model", case), 2, expert_groups=2, quantize=quantize)


def test_experts_that_a_group_cuts_round_their_inputs_by_the_largest_of_a_whole_row() -> None:
    base = model_folder(
        "qwen3_moe", num_experts=8, num_key_value_heads=2, intermediate_size=128, moe_intermediate_size=128
    )
    same_answers(base, 4, expert_groups=2, quantize="fp8", tokens=64)


def test_a_rank_has_the_whole_experts_of_its_group_and_no_others() -> None:
    folder = model_folder("mixtral")
    whole = dict(load_model(folder, device=CPU).tensors())
    parts = [dict(load_model(folder, device=CPU, comm=comm).tensors()) for comm in comms_of(2, 1, 2)]
    for number, part in enumerate(parts):
        own = {name for name in part if ".experts." in name}
        assert {int(name.split(".experts.")[1].split(".")[0]) for name in own} == {2 * number, 2 * number + 1}
        assert all(torch.equal(part[name], whole[name]) for name in own)  # type: ignore[arg-type]  # not quantized


def test_experts_in_groups_exchange_what_cut_ones_do() -> None:
    given = []
    for groups in (1, 2):
        made = EngineHarness(model_folder("mixtral"), ranks=2, shared=True, expert_groups=groups)
        comm = made.ranks[0].model.comm
        assert isinstance(comm, SharedMemory)
        made.play([made.log("one", range(20, 29), max_tokens=4)])
        given.append(comm.given)
    assert given[0] == given[1]


def test_more_spare_slots_than_other_groups_have_experts_are_refused() -> None:
    said = (
        "--num-redundant-experts 6: this model has 4 experts, and a group that has 2 of them has no use for 3"
    )
    with pytest.raises(LoadError, match=said):
        load_model(model_folder("mixtral"), device=CPU, comm=comms_of(2, 1, 2, spare=3)[0])


@pytest.mark.parametrize(
    ("family", "groups", "said"),
    [
        ("llama", 2, "this model has no experts"),
        ("qwen3_moe", 4, "this model has 6 experts, which so many groups cannot share equally"),
        (
            "mixtral",
            4,
            "this model has 4 experts, which so many .* with at least two for each",
        ),
    ],
)
def test_experts_that_so_many_groups_cannot_share_are_refused(family: str, groups: int, said: str) -> None:
    with pytest.raises(LoadError, match=f"--expert-parallel-size {groups}: {said}"):
        load_model(model_folder(family), device=CPU, comm=comms_of(4, 1, groups)[0])
