"""Several ranks as one worker: each keeps the state of the first by what it is told alone."""

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from bundled import CHOICE, OBJECT, PROMPT, harness, tokenizer
from engine_harness import EngineHarness, Played
from tiny_adapters import make_zoo
from tiny_models import model_folder

from personae.engine.speculation.policy import Always
from personae.engine.worker.group import as_one
from personae.errors import AdapterError, Overloaded
from personae.lora.source import AdapterSource
from personae.lora.stored import finished


def same_state(made: EngineHarness) -> bool:
    """Whether all ranks' caches and newest tokens are the first one's."""
    made.engine.worker._all(lambda worker: worker.adapter_stats)  # all have done what they were told
    first, *others = made.ranks
    return all(
        torch.equal(rank.kv.data.nan_to_num(7.0), first.kv.data.nan_to_num(7.0))
        and torch.equal(rank.last_tokens, first.last_tokens)
        for rank in others
    )


def load(made: EngineHarness) -> dict[str, Played]:
    """Bound and free answers with prompts in chunks, guesses, forced text and log-probabilities."""
    settings = {"max_tokens": 60, "eos": tokenizer().eos_ids}
    logs = [
        made.log("object", PROMPT, grammar=OBJECT, jump_forward=True, **settings),
        made.log("choice", PROMPT, grammar=CHOICE, jump_forward=True, seed=2, temperature=1.0, **settings),
        made.log("repeats", [*PROMPT] * 12, speculate=True, max_tokens=24),
        made.log("scored", range(5, 60), logprobs=2, prompt_logprobs=1, max_tokens=8),
        made.log("drawn", PROMPT, temperature=1.0, seed=5, max_tokens=30),
    ]
    return made.play(logs)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_another_rank_has_the_first_ones_cache_and_tokens_whatever_a_step_may_hold(runs_ahead: bool) -> None:
    tight = {"page_size": 4, "num_pages": 60, "max_model_len": 200, "max_batch_tokens": 24, "max_seqs": 3}
    alone = harness(policy=Always(), runs_ahead=runs_ahead, **tight)
    group = harness(policy=Always(), runs_ahead=runs_ahead, ranks=3, **tight)
    assert load(group) == load(alone)
    assert group.scheduler.counters.jumped
    assert group.scheduler.counters.accepted_tokens
    assert same_state(group)


def test_adapters_are_loaded_by_every_rank_from_their_source(tmp_path: Path) -> None:
    base = model_folder("qwen3")
    folders = make_zoo(tmp_path, base, ("rank-8-attention", "rank-64"))
    alone, group = EngineHarness(base, folders), EngineHarness(base, folders, ranks=2)
    for rank in group.ranks:
        for digest in group.digests.values():
            rank.discard(digest)
    worker = group.engine.worker
    for digest in group.digests.values():
        ticket = worker.load_adapter(digest, AdapterSource(()))
        assert (ticket.digest, ticket.missing) == (digest, 0)
        assert finished(ticket.pieces()) is None
    asked = [(name, [4, *range(5, 20)], name) for name in folders]
    found = [made.play([made.log(*one, max_tokens=9) for one in asked]) for made in (alone, group)]
    assert found[0] == found[1]
    assert same_state(group)
    first, second = group.ranks
    assert first.adapters.residents == second.adapters.residents
    worker.release(group.digests["rank-64"])
    assert [rank.adapters.pins(group.digests["rank-64"]) for rank in group.ranks] == [0, 0]


class Reader:
    """A rank that reads an adapter beside the steps, in three pieces or with an error in the first."""

    def __init__(self, error: Exception | None = None) -> None:
        self.device, self.layout, self.vocab_size = torch.device("cpu"), None, 1
        self.experts = None
        self.digest, self.missing = "digest", 2
        self.arriving: Future[None] = Future()
        self.ran = 0
        self.discarded: list[str] = []
        self._error = error

    def discard(self, digest: str) -> None:
        self.discarded.append(digest)

    def load_adapter(self, digest: str, source: AdapterSource) -> "Reader":
        return self

    def pieces(self):  # type: ignore[no-untyped-def]  # Pieces
        if self._error is not None:
            raise self._error
        for _ in range(3):
            self.ran += 1
            yield
        return self.arriving


def test_an_adapter_is_there_when_every_rank_has_it() -> None:
    ranks = [Reader(), Reader(), Reader()]
    ticket = as_one(ranks).load_adapter("digest", AdapterSource(()))  # type: ignore[arg-type]  # as far as is asked
    assert ticket.missing == 2
    arriving = finished(ticket.pieces())
    assert [rank.ran for rank in ranks] == [3, 3, 3]
    assert arriving is not None
    for rank in ranks[1:]:
        rank.arriving.set_result(None)
    assert not arriving.done()
    ranks[0].arriving.set_exception(AdapterError("its file has changed"))
    with pytest.raises(AdapterError, match="has changed"):
        arriving.result()


def test_ranks_that_have_no_room_refuse_an_adapter_as_one_would() -> None:
    ranks = [Reader(Overloaded("no room")), Reader(Overloaded("no room"))]
    ticket = as_one(ranks).load_adapter("digest", AdapterSource(()))  # type: ignore[arg-type]  # as far as is asked
    with pytest.raises(Overloaded, match="no room"):
        finished(ticket.pieces())


@pytest.mark.parametrize("error", [Overloaded("no room"), AdapterError("a row is zero")])
def test_an_adapter_that_one_rank_cannot_place_is_discarded_by_the_others(error: Exception) -> None:
    ranks = [Reader(), Reader(error), Reader()]
    for rank in ranks:
        rank.arriving.set_result(None)
    ticket = as_one(ranks).load_adapter("digest", AdapterSource(()))  # type: ignore[arg-type]  # as far as is asked
    with pytest.raises(type(error)):
        finished(ticket.pieces())
    assert [rank.discarded for rank in ranks] == [["digest"], [], ["digest"]]


class Lender:
    """A rank that has borrowed pages, and can free a part of them."""

    def __init__(self, lent: list[int], free: int) -> None:
        self.device, self.layout, self.vocab_size = torch.device("cpu"), None, 1
        self.experts = None
        self.lent, self._free = lent, free

    def recall(self, count: int) -> tuple[int, ...]:
        count = min(count, self._free)
        pages = tuple(self.lent[len(self.lent) - count :])
        del self.lent[len(self.lent) - count :]
        return pages

    def lending(self, pages: tuple[int, ...]):  # type: ignore[no-untyped-def]  # an iterator
        yield
        self.lent += pages


def test_memory_goes_back_to_the_cache_as_far_as_all_ranks_can_free_it() -> None:
    ranks = [Lender([1, 2, 3, 4], 4), Lender([1, 2, 3, 4], 1), Lender([1, 2, 3, 4], 3)]
    group = as_one(ranks)  # type: ignore[arg-type]  # as far as is asked
    assert group.recall(4) == (4,)
    assert [rank.lent for rank in ranks] == [[1, 2, 3]] * 3


def test_what_a_step_raises_on_another_rank_the_next_step_raises() -> None:
    made = harness(ranks=2)

    def fails(*_: object) -> None:
        raise RuntimeError("the second rank's device is lost")

    made.ranks[1].model = fails  # type: ignore[assignment]  # has no forward
    with pytest.raises(AttributeError, match="forward"):
        made.play([made.log("a", PROMPT)])


def test_one_rank_is_the_worker_itself() -> None:
    rank = harness().ranks[0]
    assert as_one([rank]) is rank
