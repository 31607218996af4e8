"""A trained head computes what its makers' equations say, and changes no token."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from bundled import MODEL, harness
from drafting import TINY, check_adapters_answer_as_without, check_all_drafts_are_right, long_logs
from engine_harness import EngineHarness
from recorded_graphs import RecordedGraphs
from safetensors.torch import load_file
from tiny_heads import Reference, bigram_model, config_of, make_head_folder, make_knowing_head, write_head
from tiny_models import model_folder
from tiny_mtp import MtpReference, make_knowing_mtp, make_mtp_folder
from wishes import agree, logs, truth

from personae.engine.heads.states import HeadStates
from personae.engine.speculation.batch_proposer import Wish
from personae.engine.speculation.head_proposer import HeadProposer
from personae.engine.speculation.policy import Always, Measured
from personae.engine.speculation.speculator import expected_text
from personae.kernels import registry
from personae.kernels.attention import AttentionBatch
from personae.kernels.cpu import operators

MAKE = {"eagle3": make_head_folder, "mtp": make_mtp_folder}
REFERENCES = {"eagle3": Reference, "mtp": MtpReference}


class Noted:
    """What a head was asked, and its logits: `calls` has the tokens of each sequence, `logits` those of each
    pass."""

    def __init__(self, made: EngineHarness) -> None:
        speculator = made.engine._speculator
        assert speculator is not None
        assert isinstance(speculator._model, HeadProposer)
        proposer = self.proposer = speculator._model
        self.calls: list[tuple[dict[int, Wish], dict[int, tuple[int, ...]], list[torch.Tensor]]] = []
        propose, logits = proposer.propose, proposer._head.logits

        def noted_propose(wishes: Any) -> Any:
            asked = {slot: Wish(list(wish.tokens), wish.most) for slot, wish in wishes.items()}
            self.calls.append((asked, {}, []))
            self.calls[-1][1].update(found := propose(wishes))
            return found

        def noted_logits(hidden: torch.Tensor) -> torch.Tensor:
            self.calls[-1][2].append(found := logits(hidden))
            return found

        proposer.propose = noted_propose  # type: ignore[method-assign]  # looks on
        proposer._head.logits = noted_logits  # type: ignore[method-assign]  # looks on


@pytest.fixture(scope="module")
def base() -> Path:
    return model_folder("llama", num_hidden_layers=8)


@pytest.fixture(scope="module")
def simple(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return bigram_model(tmp_path_factory.mktemp("bigram"), base)


@pytest.fixture(scope="module", params=["eagle3", "mtp"])
def knowing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, simple: Path) -> Path:
    make = {"eagle3": make_knowing_head, "mtp": make_knowing_mtp}[request.param]
    return make(tmp_path_factory.mktemp("knowing"), simple)


@pytest.fixture(scope="module", params=["eagle3", "mtp"])
def bundled_head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    more = {"size": 2000} if request.param == "eagle3" else {}
    return MAKE[request.param](tmp_path_factory.mktemp("head"), MODEL, **more)


@pytest.fixture(params=["eagle3", "mtp"])
def head(request: pytest.FixtureRequest, tmp_path: Path, base: Path) -> Path:
    return MAKE[request.param](tmp_path / "head", base)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("eagle3", {}),
        ("eagle3", {"norm_before_residual": True}),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": None}),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 8]}),
        ("eagle3", {"num_key_value_heads": 2, "rope_theta": 500.0, "rms_norm_eps": 1e-3}),
        ("mtp", {}),
        ("mtp", {"num_key_value_heads": 1, "rope_theta": 500.0, "rms_norm_eps": 1e-3}),
    ],
    ids=str,
)
def test_every_guess_has_the_logits_of_the_equations(
    base: Path, tmp_path: Path, kind: str, overrides: dict[str, Any]
) -> None:
    folder = MAKE[kind](tmp_path, base, **overrides)
    reference = REFERENCES[kind](folder, base)
    made = EngineHarness(base, policy=Always(), draft=folder, propose=expected_text, max_batch_tokens=16)
    noted = Noted(made)
    rng = random.Random(1)
    for count in (1, 2, 37):
        made.play([made.log(f"{count}", rng.choices(range(4, 500), k=count), max_tokens=12, ignore_eos=True)])
    compared = 0
    for wishes, found, passes in noted.calls[::3]:
        for slot, guessed in found.items():  # one sequence at a time
            expected = reference.logits(wishes[slot].tokens, list(guessed[:-1]))
            for mine, theirs, token in zip(passes, expected, guessed, strict=True):
                torch.testing.assert_close(mine[0], theirs, atol=2e-4, rtol=2e-4)
                assert int(reference.ids[theirs.argmax()]) == token
                compared += 1
    assert compared > 20


def test_both_formats_of_a_checkpoint_are_read(base: Path, tmp_path: Path) -> None:
    flat = make_head_folder(tmp_path / "flat", base, norm_before_residual=True)
    config, tensors = config_of(flat), load_file(flat / "model.safetensors")
    own = ("draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids", "architectures")
    layer = {name: value for name, value in config.items() if name not in own}
    sectioned = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
        "transformer_layer_config": layer,
    }
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    other = write_head(tmp_path / "sectioned", sectioned, renamed)
    drafts = []
    for folder in (flat, other):
        made = EngineHarness(base, policy=Always(), draft=folder, propose=expected_text)
        noted = Noted(made)
        made.play(long_logs(made, 3))
        drafts.append([found for _, found, _ in noted.calls])
    assert drafts[0] == drafts[1]
    assert any(drafts[0])


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"max_seqs": 4, "max_batch_tokens": 9},
        {**TINY, "runs_ahead": True, "lookahead": 3},
    ],
    ids=str,
)
def test_every_wish_gets_its_tokens_with_a_head(bundled_head: Path, sizes: dict[str, Any]) -> None:
    made = harness(policy=Always(), draft=bundled_head, propose=expected_text, **sizes)
    agree(made.play(logs(made)), truth())
    agree(made.play(logs(made)), truth())  # from the prefix cache
    made.scheduler.check_integrity()
    assert made.scheduler.counters.drafts_by["head"] > 100
    if "num_pages" in sizes:
        assert made.scheduler.counters.preemptions


def test_a_head_and_guesses_from_the_text_go_together(bundled_head: Path) -> None:
    for policy in (Always(), Measured()):
        made = harness(policy=policy, draft=bundled_head)
        agree(made.play(logs(made)), truth())


@pytest.mark.parametrize("sizes", [{}, {"max_seqs": 3, "max_batch_tokens": 24}, TINY], ids=str)
def test_a_head_that_knows_the_model_is_always_right(
    simple: Path, knowing: Path, sizes: dict[str, Any]
) -> None:
    check_all_drafts_are_right(simple, knowing, sizes)


def test_a_sequence_that_takes_up_shared_pages_gets_the_guesses_that_it_gets_alone(
    base: Path, head: Path
) -> None:
    """The head's last place of a page has a token of the next page, which differs."""
    begins = random.Random(2).choices(range(4, 500), k=32)  # two pages
    drafts = []
    for earlier in ((), (100,), (101, 102)):
        made = EngineHarness(base, policy=Always(), draft=head, propose=expected_text)
        noted = Noted(made)
        for number, token in enumerate((*earlier, 103)):
            noted.calls.clear()
            played = made.play(
                [made.log(f"{number}", [*begins, token, 7, 8], max_tokens=20, ignore_eos=True)]
            )
        assert played[f"{len(earlier)}"].cached == (32 if earlier else 0)
        drafts.append([found for _, found, _ in noted.calls])
    assert drafts[0] == drafts[1] == drafts[2]


def test_a_sequence_with_steps_without_drafts_in_between_gets_the_same_guesses(
    base: Path, head: Path
) -> None:
    class Sometimes(Always):
        def __init__(self) -> None:
            self._dice = random.Random(3)

        def rest(self, rows: int, *, tried: bool) -> int:
            return self._dice.choice((0, 0, 1, 3, 5))

    asked: list[dict[tuple[int, ...], tuple[int, ...]]] = []
    for policy in (Always(), Sometimes()):
        made = EngineHarness(base, policy=policy, draft=head, propose=expected_text)
        noted = Noted(made)
        made.play(long_logs(made, 1, max_tokens=60))
        asked.append(
            {
                tuple(wishes[slot].tokens): guessed
                for wishes, found, _ in noted.calls
                for slot, guessed in found.items()
            }
        )
    both = asked[0].keys() & asked[1].keys()
    assert len(asked[1]) < len(asked[0])
    assert len(both) > 10
    for tokens in both:
        few = min(len(each[tokens]) for each in asked)  # a plan may have room for fewer
        assert few
        assert asked[0][tokens][:few] == asked[1][tokens][:few]


def test_adapters_answer_as_without_a_head_and_change_what_it_reads(
    base: Path, head: Path, tmp_path: Path
) -> None:
    made = check_adapters_answer_as_without(base, head, tmp_path)
    assert made.scheduler.counters.drafts_by["head"] > 50


@pytest.mark.skipif("fuse" not in operators(), reason="no compiler, or no AVX-512 on this machine")
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_fused_step_leaves_the_states_that_layer_by_layer_steps_leave(
    tmp_path: Path, quantize: str | None
) -> None:
    base = model_folder("llama", num_hidden_layers=6, hidden_size=128, torch_dtype="bfloat16")
    folder = make_head_folder(tmp_path, base, eagle_aux_hidden_state_layer_ids=[0, 2, 3, 6])
    settings: dict[str, Any] = {"dtype": "bfloat16", "quantize": quantize}
    states = []
    for fused in (True, False):
        made = EngineHarness(base, policy=Always(), draft=folder, propose=expected_text, **settings)
        model = made.ranks[0].model
        assert model._fused is not None
        if not fused:
            model._fused = None
        kept: list[torch.Tensor] = []
        reader = made.ranks[0].kv.reader
        assert reader is not None
        reader.write = lambda hidden, places, kept=kept: kept.append(hidden.float())  # type: ignore[method-assign, misc]
        model.forward(torch.arange(10, 50), torch.arange(40), made.ranks[0].kv, _one_row(40))
        states.append(kept[0])
    assert states[0].shape == (40, 4, 128)
    apart = (states[0] - states[1]).norm(dim=(0, 2)) / states[1].norm(dim=(0, 2))
    assert apart.max() < (0.1 if quantize else 0.05)  # of different layers: about 1
    assert states[0][:, 0].equal(model.embedding.plain()[10:50].float())


@pytest.mark.skipif("fuse" not in operators(), reason="no compiler, or no AVX-512 on this machine")
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("kind", MAKE)
def test_a_fused_model_gives_the_same_bits_with_a_head(
    tmp_path: Path, kind: str, quantize: str | None
) -> None:
    base = model_folder("llama", num_hidden_layers=6, hidden_size=128, torch_dtype="bfloat16")
    folder = MAKE[kind](tmp_path, base)
    settings: dict[str, Any] = {"dtype": "bfloat16", "quantize": quantize}
    plain = EngineHarness(base, **settings)
    made = EngineHarness(base, policy=Always(), draft=folder, propose=expected_text, **settings)
    assert made.ranks[0].model._fused is not None
    found, expected = (each.play(long_logs(each, 4, logprobs=2)) for each in (made, plain))
    for id, one in expected.items():
        assert (found[id].tokens, found[id].logprobs) == (one.tokens, one.logprobs)
    assert made.scheduler.counters.drafts_by["head"] > 50


@pytest.mark.skipif("fuse" not in operators(), reason="no compiler, or no AVX-512 on this machine")
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_an_mtp_layer_that_knows_a_fused_model_is_right_with_its_output_matrix(
    tmp_path: Path, quantize: str | None
) -> None:
    base = model_folder("llama", hidden_size=128, torch_dtype="bfloat16")
    simple = bigram_model(tmp_path / "bigram", base)
    folder = make_knowing_mtp(tmp_path / "knowing", simple)
    settings: dict[str, Any] = {"dtype": "bfloat16", "quantize": quantize}
    made = EngineHarness(simple, policy=Always(), draft=folder, propose=expected_text, **settings)
    assert made.ranks[0].model._fused is not None
    made.play(long_logs(made, 9))
    counters = made.scheduler.counters
    assert counters.accepted_tokens >= 0.9 * counters.draft_tokens > 200


@pytest.mark.parametrize("prefill", [False, True])
def test_graphs_leave_the_states_that_steps_without_graphs_leave(
    base: Path, head: Path, monkeypatch: pytest.MonkeyPatch, prefill: bool
) -> None:
    capture = RecordedGraphs()
    monkeypatch.setattr(registry, "operators", capture.operators)
    states, found = [], []
    for graphs in ({}, {"capture": capture, "prefill": prefill}):
        made = EngineHarness(base, policy=Always(), draft=head, propose=expected_text, **graphs)
        found.append({id: one.tokens for id, one in made.play(long_logs(made, 5)).items()})
        reader = made.ranks[0].kv.reader
        assert isinstance(reader, HeadStates)
        states.append(reader.values[:-16])  # the last page is for padding
        assert made.scheduler.counters.drafts_by["head"] > 50
    assert capture.replays > 5
    assert found[0] == found[1]
    torch.testing.assert_close(states[1], states[0], equal_nan=True, rtol=1e-4, atol=1e-5)


def _one_row(count: int) -> AttentionBatch:
    return AttentionBatch(
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
        torch.arange(-(-count // 16), dtype=torch.int32)[None],
        torch.arange(count),
        max_query=count,
        max_kv=count,
    )
