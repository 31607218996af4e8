"""A model that ranks share answers as one process does, for each kind of block, weight and adapter. The ranks
are threads here; `evals/parallel` plays the same with processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bundled import CHOICE, OBJECT, PROMPT, harness, tokenizer
from engine_harness import EngineHarness, Played, comms_of
from family_models import make_family_folder
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from shared_model import EVERY_KIND, adapters_of, same_answers
from tiny_models import model_folder

from personae.engine.loader import load_model
from personae.engine.parallel.comm import ONE_RANK, SharedMemory
from personae.engine.speculation.policy import Always
from personae.errors import LoadError, ModelLoadError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("family", "size", "changes"),
    [
        ("qwen2", 2, {}),  # biases of q, k and v
        (
            "llama",
            4,
            {"num_key_value_heads": 1, "vocab_size": 511},
        ),  # fewer keys than ranks, an uneven vocabulary
    ],
)
def test_base_and_adapters_of_every_kind_answer_in_one_batch_as_in_one_process(
    family: str, size: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    base = model_folder(family, **changes)
    same_answers(base, size, adapters_of(base, tmp_path, EVERY_KIND))


@pytest.mark.parametrize(
    "family", ["phi3", "mixtral", "gemma3"]
)  # merged weights, experts, norms after halves
def test_other_kinds_of_blocks_answer_as_in_one_process(family: str) -> None:
    same_answers(model_folder(family), 2)


@pytest.mark.parametrize("case", ["gemma4", "gemma4, keys as values", "gemma4, experts"])
def test_layers_that_read_keys_and_values_of_others_answer_as_in_one_process(
    case: str, tmp_path: Path
) -> None:
    base = make_family_folder(tmp_path / "model", case)
    made = {
        "attention": {"rank": 4, "seed": 3, "targets": ["q_proj", "o_proj"]},
        "mlp": {"rank": 4, "seed": 4, "targets": ["down_proj", "up_proj"]},
    }
    same_answers(base, 2, adapters_of(base, tmp_path, made))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_weights_that_are_quantized_are_the_same_numbers_on_ranks(quantize: str) -> None:
    same_answers(model_folder("llama", intermediate_size=128), 2, quantize=quantize)


def test_blocks_of_a_file_are_kept_by_ranks_and_not_cut(tmp_path: Path) -> None:
    folders = {size: model_folder("llama", intermediate_size=size) for size in (128, 96)}
    fits, cut = (
        write_gguf(tmp_path / f"{size}.gguf", folder, GGMLQuantizationType.Q8_0)
        for size, folder in folders.items()
    )
    whole, *parts = (load_model(fits, device=CPU, comm=comm) for comm in (ONE_RANK, *comms_of(2)))
    for down in (lambda model: model.layers[0].mlp.down, lambda model: model.layers[0].attention.o):
        assert torch.equal(torch.cat([down(part).plain() for part in parts], 1), down(whole).plain())
    with pytest.raises(ModelLoadError, match=r"down_proj\.weight: --tensor-parallel-size would cut blocks"):
        load_model(cut, device=CPU, comm=comms_of(2)[0])


@pytest.mark.parametrize("sizes", [{"ranks": 2}, {"stages": 2}])
def test_a_bound_a_guessed_and_a_scored_answer_are_as_in_one_process(sizes: dict[str, int]) -> None:
    settings = {"max_tokens": 60, "eos": tokenizer().eos_ids}

    def load(made: EngineHarness) -> dict[str, Played]:
        return made.play(
            [
                made.log("object", PROMPT, grammar=OBJECT, jump_forward=True, **settings),
                made.log(
                    "choice", PROMPT, grammar=CHOICE, jump_forward=True, seed=2, temperature=1.0, **settings
                ),
                made.log("repeats", [*PROMPT] * 12, speculate=True, max_tokens=24),
            ]
        )

    alone = harness(policy=Always())
    together = harness(policy=Always(), shared=True, **sizes)
    assert load(together) == load(alone)
    assert together.scheduler.counters.accepted_tokens


def test_a_step_exchanges_what_the_documentation_says() -> None:
    made = EngineHarness(model_folder("llama"), ranks=2, shared=True)
    config = made.ranks[0].model.whole
    comm = made.ranks[0].model.comm
    assert isinstance(comm, SharedMemory)
    made.play([made.log("warm", range(5, 9), max_tokens=1)])
    before = comm.given
    made.play([made.log("one", range(20, 29), max_tokens=1)])
    tokens, sampled = 9, 1
    sums = tokens * (2 * config.layers + 1) * config.hidden_size
    assert comm.given - before == 4 * (sums + sampled * config.vocab_size // 2)


def test_ranks_that_round_inputs_exchange_the_largest_of_each_row_as_the_documentation_says() -> None:
    made = EngineHarness(model_folder("llama", intermediate_size=128), ranks=2, shared=True, quantize="fp8")
    config, comm = made.ranks[0].model.whole, made.ranks[0].model.comm
    assert isinstance(comm, SharedMemory)
    made.play([made.log("one", range(20, 29), max_tokens=1)])
    tokens, sampled = 9, 1
    sums = tokens * (2 * config.layers + 1) * config.hidden_size + sampled * config.vocab_size // 2
    assert comm.given == 4 * (sums + tokens * 2 * config.layers)


@pytest.mark.parametrize("groups", [1, 2])
def test_experts_that_round_inputs_exchange_it_within_their_group(groups: int) -> None:
    base = model_folder(
        "qwen3_moe", num_experts=8, num_key_value_heads=2, intermediate_size=128, moe_intermediate_size=128
    )
    made = EngineHarness(base, ranks=4, shared=True, quantize="fp8", expert_groups=groups)
    config, comms = made.ranks[0].model.whole, [rank.model.comm for rank in made.ranks]
    made.play([made.log("one", range(20, 29), max_tokens=1)])
    tokens, sampled, chosen = 9, 1, made.ranks[0].model.layers[0].experts.spec.routing.top_k  # type: ignore[union-attr]  # it has experts
    sums = tokens * (2 * config.layers + 1) * config.hidden_size + sampled * config.vocab_size // 4
    each = sums + tokens * config.layers  # of o
    of_experts = tokens * chosen * config.layers
    for comm in comms:
        assert isinstance(comm, SharedMemory)
        assert comm.given == 4 * (each + (of_experts if groups == 1 else 0))
    if groups == 2:
        first, same, second, _ = (comm.group.given for comm in comms)  # type: ignore[attr-defined]  # Parts
        assert first == same
        assert first + second == 4 * of_experts


@pytest.mark.parametrize(
    ("family", "size", "said"),
    [
        ("llama", 3, "4 attention heads"),
        ("olmo2", 2, "attention that normalises all heads together"),
        ("mixtral", 64, "4 attention heads"),
    ],
)
def test_a_model_that_so_many_ranks_cannot_share_is_refused_with_its_size(
    family: str, size: int, said: str
) -> None:
    with pytest.raises(LoadError, match=f"--tensor-parallel-size {size}: this model has {said}"):
        load_model(model_folder(family), device=CPU, comm=comms_of(size)[0])


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("deepseek_v3", "latent attention"),
        ("lfm2", "short convolutions"),
        ("qwen3_next", "gated delta nets"),
        ("granitemoehybrid, Mamba", "Mamba-2 layers"),
    ],
)
def test_layers_that_ranks_cannot_share_are_refused_by_their_kind(
    case: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=f"--tensor-parallel-size 2: this model has {said}"):
        load_model(make_family_folder(tmp_path / "model", case), device=CPU, comm=comms_of(2)[0])
