"""Layers with convolutions and states, apart from what `tests/engine/test_families.py` compares."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_harness import EngineHarness
from family_models import make_family_folder
from hf import hf_greedy, hf_logits, hf_model, relative_error
from paged import PagedSequences
from small_pools import Granules
from tiny_models import VOCAB

from personae.actors.assembly import assemble
from personae.actors.options import EngineOptions
from personae.engine.kv import KVCache
from personae.engine.layers.block import KVSpec
from personae.engine.loader import load_model
from personae.engine.plan import MemoryLayout
from personae.engine.speculation.policy import Always
from personae.engine.speculation.speculator import expected_text
from personae.errors import LoadError, ModelLoadError

CPU = torch.device("cpu")
DELTA, MAMBA = "qwen3_5", "granitemoehybrid, Mamba"
CASES = [DELTA, MAMBA, "lfm2"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {case: make_family_folder(tmp_path_factory.mktemp("state"), case) for case in CASES}


@pytest.mark.parametrize("page_size", [8, 16, 128])
@pytest.mark.parametrize("case", CASES)
def test_the_newest_tokens_can_be_computed_again(case: str, page_size: int, folders: dict[str, Path]) -> None:
    tokens = random.Random(2).choices(range(VOCAB), k=90)
    truth = hf_logits(hf_model(folders[case]), tokens)
    paged = PagedSequences(
        load_model(folders[case], device=CPU, dtype="float32"), page_size=page_size, num_pages=20
    )
    for end in range(13, 90, 11):
        paged.step({"a": tokens[paged.lengths.get("a", 0) : end - 8]})
        paged.step({"a": [7] * 8})  # as guesses that are wrong
        paged.lengths["a"] -= 8
        last = paged.step({"a": tokens[end - 8 : end]})["a"]
        assert relative_error(last, truth[end - 1]) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_a_token_do_not_depend_on_chunks_or_pages(case: str, folders: dict[str, Path]) -> None:
    tokens = random.Random(3).choices(range(VOCAB), k=150)
    decoder = load_model(folders[case], device=CPU, dtype="float32")
    whole, _ = PagedSequences(decoder, page_size=16).forward({"a": tokens})
    truth = decoder.logits(whole[-1:])[0].clone()
    for page_size, sizes in ((16, (1, 15, 16, 17, 101)), (64, (64, 1, 63, 22)), (128, (3, 5, 142))):
        paged, first = PagedSequences(decoder, page_size=page_size, num_pages=20), 0
        for size in sizes:
            last = paged.step({"a": tokens[first : first + size]})["a"]
            first += size
        assert relative_error(last, truth) < 1e-4


def test_large_pages_are_shared_as_a_whole_and_sequences_preempted(folders: dict[str, Path]) -> None:
    model, common = hf_model(folders[DELTA]), random.Random(4).choices(range(VOCAB), k=140)
    prompts = {name: [*common, *random.Random(name).choices(range(VOCAB), k=30)] for name in "abc"}
    truth = {name: hf_greedy(model, prompt, 40) for name, prompt in prompts.items()}
    harness = EngineHarness(folders[DELTA], page_size=64, num_pages=8, max_batch_tokens=50, whole=True)
    for again in ("", "again "):
        logs = [harness.log(again + name, prompt, max_tokens=40) for name, prompt in prompts.items()]
        played = harness.play(logs)
        assert {name: played[again + name].tokens for name in prompts} == truth
        cached = {one.cached for one in played.values()}
        assert cached <= {0, 64, 128}
    assert max(cached) == 128
    assert harness.scheduler.counters.preemptions > 0


@pytest.mark.parametrize(("case", "page_size"), [(DELTA, 64), (MAMBA, 16), ("lfm2", 16)])
def test_guesses_change_no_token(case: str, page_size: int, folders: dict[str, Path]) -> None:
    prompt = [5, 6, 7, 8] * 12
    truth = hf_greedy(hf_model(folders[case]), prompt, 48)
    harness = EngineHarness(
        folders[case], page_size=page_size, policy=Always(), propose=expected_text, whole=page_size > 32
    )
    guesses = truth[:20] + [3] * 2 + truth[22:48]
    log = harness.log("a", prompt, max_tokens=48, prediction=tuple(guesses))
    assert harness.play([log])["a"].tokens == truth
    counters = harness.scheduler.counters
    assert counters.draft_tokens > counters.accepted_tokens > 20


def test_a_model_with_states_has_larger_pages_and_refuses_what_it_cannot_do(
    folders: dict[str, Path],
) -> None:
    layouts = {
        case: assemble(
            EngineOptions(folders[case], device="cpu", dtype="float32", kv_memory=2**24)
        ).engine_spec.layout
        for case in CASES
    }
    assert (layouts["lfm2"].page_size, layouts["lfm2"].whole) == (16, False)
    assert layouts[DELTA].page_size > 16 < layouts[MAMBA].page_size
    assert layouts[DELTA].whole
    with pytest.raises(LoadError, match="int8 does not work for models with convolutions or states"):
        assemble(EngineOptions(folders["lfm2"], device="cpu", kv_cache_dtype="int8"))
    with pytest.raises(ModelLoadError, match="models whose layers have states cannot guess"):
        assemble(EngineOptions(folders["lfm2"], device="cpu", draft_model=folders[MAMBA]))


STATES = (KVSpec(2, 8), KVSpec(1, 12, latent=0, state=(2, 4, 6)), KVSpec(1, 12, latent=0, state=(2, 4, 6)))


@pytest.mark.parametrize("granule", [0, 1024])
def test_a_page_has_the_last_two_windows_of_states_and_their_tokens(granule: int) -> None:
    layout = MemoryLayout(6, 64, max_seqs=1, max_model_len=64, max_batch_tokens=64)
    memory = Granules(granule, free=100) if granule else None
    kv = KVCache(STATES, layout, torch.bfloat16, CPU, memory=memory)
    assert {layer: tuple(states.shape) for layer, states in kv.states.items()} == {
        1: (6, 2, 2, 4, 6),
        2: (6, 2, 2, 4, 6),
    }
    assert tuple(kv.layers[1][0].shape) == (6, 1, 32, 12)
    assert kv.page_bytes == 64 * 2 * 2 * 8 * 2 + 2 * (32 * 12 * 2 + 2 * 48 * 4)
    generator = torch.Generator().manual_seed(0)
    for states in kv.states.values():
        states.normal_(generator=generator)
    kv.copy_pages([(4, 1)])
    content = kv.read_pages([4])
    assert content.shape == (1, kv.page_bytes)
    other = KVCache(STATES, replace(layout, num_pages=3), torch.bfloat16, CPU)
    other.write_pages([2], content)
    for layer, states in kv.states.items():
        assert torch.equal(states[1], states[4])
        assert torch.equal(other.states[layer][2], states[4])
