"""Answers whose masks are made in another process: late or not, their tokens are those that they would be."""

import os
import signal
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from engine_harness import EngineHarness, Played
from msgspec.structs import replace
from sandbox_limits import PATIENT
from tiny_models import model_folder
from worst import text_vocabulary

from personae.engine.speculation.policy import Always, Policy
from personae.errors import GRAMMAR_TOO_SLOW
from personae.grammar import replay
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.sandbox import masks
from personae.grammar.sandbox.masks import RemoteGrammar, RemoteMatcher
from personae.grammar.sandbox.server import end_frame
from personae.grammar.spec import GrammarSpec

VOCABULARY = text_vocabulary()
LIST = GrammarSpec("ebnf", 'root ::= "[" item ("," item)* "]"\nitem ::= [a-z]+ | "(" item ")"')
LARK = GrammarSpec("lark", 'start: "<" word ("," word)* ">"\nword: /[a-z]+/ | "(" word ")"')
SPECS = [LIST, LARK, None]
BUDGETS = [3, 5, 9, 24]  # short ones are asked about each token


def played(compiler: GrammarCompiler, runs_ahead: bool = False, lookahead: int = 2, **settings: Any) -> Any:
    harness = EngineHarness(
        model_folder("qwen3", vocab_size=VOCABULARY.size), max_seqs=4, lookahead=lookahead, **settings
    )
    harness.engine.runs_ahead = runs_ahead
    harness.grammars |= {spec: compiler.compile(spec) for spec in SPECS if spec is not None}
    logs = []
    for number in range(12):
        changes: dict[str, Any] = {"max_tokens": BUDGETS[number % 4], "seed": number}
        changes["temperature"] = number % 2 * 1.5
        changes["logit_bias"] = {token: token * (number + 3) % 11 for token in range(VOCABULARY.size)}
        if number >= 8:
            changes["presence_penalty"] = 1.5
        spec = SPECS[number % 3]
        logs.append(
            harness.log(f"{number}", [5, 6, 7 + number], grammar=spec, eos=VOCABULARY.stop_ids, **changes)
        )
    return harness.play(logs), harness


def tokens_of(found: dict[str, Played]) -> dict[str, tuple[list[int], str | None, str | None]]:
    return {id: (one.tokens, one.finish, one.error) for id, one in found.items()}


@pytest.fixture(scope="module")
def remote():
    compiler = GrammarCompiler(VOCABULARY, limits=PATIENT)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def expected():
    return tokens_of(played(GrammarCompiler(VOCABULARY, sandboxed=False))[0])


@pytest.mark.parametrize(("runs_ahead", "lookahead"), [(False, 1), (False, 2), (True, 1), (True, 2)])
@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_row_that_sits_steps_out_has_the_tokens_that_it_would_have(
    remote, expected, monkeypatch, runs_ahead: bool, lookahead: int, late: int
) -> None:
    asked: dict[tuple[int, int, object], int] = {}

    def wait(self: RemoteMatcher, deadline: float) -> bool:
        """Not there the first times that it is asked for; then at once."""
        state = id(self), self._left, self._asked
        asked[state] = asked.get(state, 0) + 1
        if asked[state] <= late:
            return False
        while not self.ready:
            time.sleep(0.0005)
        return True

    monkeypatch.setattr(RemoteMatcher, "wait", wait)
    found, harness = played(remote, runs_ahead, lookahead)
    assert tokens_of(found) == expected
    assert bool(harness.resumed) == bool(late)


def test_a_preempted_answer_is_bound_again_and_has_the_same_tokens(remote, expected) -> None:
    found, harness = played(remote, num_pages=8, page_size=4)
    assert harness.scheduler.counters.preemptions
    assert tokens_of(found) == expected


@pytest.mark.parametrize(("runs_ahead", "lookahead"), [(False, 1), (False, 2), (False, 4), (True, 2)])
@pytest.mark.parametrize("speculates", [False, True])
def test_a_preempted_answer_has_the_same_tokens_however_long_its_grammar_takes_to_read_it_again(
    expected, monkeypatch, runs_ahead: bool, lookahead: int, speculates: bool
) -> None:
    clock = count()
    monkeypatch.setattr(replay, "thread_time", lambda: next(clock))  # so a token at a time
    policy = Always() if speculates else None
    compiler = GrammarCompiler(VOCABULARY, sandboxed=False)
    found, harness = played(compiler, runs_ahead, lookahead, policy=policy, num_pages=8, page_size=4)
    assert harness.scheduler.counters.preemptions
    assert harness.resumed
    assert tokens_of(found) == expected


@pytest.mark.parametrize("policy", [None, Always()])
def test_other_rows_have_their_steps_while_a_grammar_reads_a_long_answer_again(
    monkeypatch, policy: Policy | None
) -> None:
    folder = model_folder("qwen3", vocab_size=VOCABULARY.size)
    harness = EngineHarness(folder, max_seqs=4, policy=policy)
    harness.grammars |= {LIST: GrammarCompiler(VOCABULARY, sandboxed=False).compile(LIST)}
    bound = {"grammar": LIST, "eos": VOCABULARY.stop_ids, "max_tokens": 24}
    before = harness.play([harness.log("long", [5, 6], **bound)])["long"].tokens
    steps: list[int] = []

    def read_the_clock() -> int:
        """A second passes with each token that a replay takes, so it takes one at a time."""
        steps.append(harness.steps)
        return len(steps)

    monkeypatch.setattr(replay, "thread_time", read_the_clock)
    whole = harness.log("long", [5, 6, *before[:16]], **bound)
    found = harness.play([replace(whole, prompt_length=2), harness.log("other", [5, 6, 8], max_tokens=8)])
    assert found["long"].tokens == before[16:]
    assert found["other"].finish == "length"
    assert harness.resumed == 1
    assert len(set(steps)) >= (3 if policy else 8)  # those of the other row


def test_an_answer_whose_masks_take_too_long_ends_with_an_error_of_its_own_and_the_others_do_not(
    remote, expected, monkeypatch
) -> None:
    slow = remote.compile(GrammarSpec("ebnf", "root ::= s\ns ::= s s | [a-z] | [a-z] s | s [a-z]"))
    assert isinstance(slow, RemoteGrammar)
    begin = RemoteGrammar.begin

    def spend(self, budget, tokens):
        answer = begin(self, budget, tokens)
        if self is slow:
            slow._received += end_frame(signal.SIGPROF)  # as if the kernel had ended it
        return answer

    monkeypatch.setattr(RemoteGrammar, "begin", spend)
    harness = EngineHarness(model_folder("qwen3", vocab_size=VOCABULARY.size), max_seqs=4)
    spec = GrammarSpec("ebnf", "slow")
    harness.grammars |= {spec: slow, LIST: remote.compile(LIST)}
    found = harness.play(
        [
            harness.log("slow", [5, 6, 7], grammar=spec, eos=VOCABULARY.stop_ids),
            harness.log("other", [5, 6, 7], grammar=LIST, eos=VOCABULARY.stop_ids),
            harness.log("free", [5, 6, 8]),
        ]
    )
    assert (found["slow"].finish, found["slow"].code) == ("error", GRAMMAR_TOO_SLOW)
    assert [found[id].error for id in ("other", "free")] == [None, None]


def test_what_is_not_bound_so_is_never_asked(monkeypatch) -> None:
    from personae.engine.deferral import Deferrals

    def asked(*_: object) -> None:
        raise AssertionError("a step without such grammars looked for their masks")

    monkeypatch.setattr(Deferrals, "find_deferred", asked)
    harness = EngineHarness(model_folder("qwen3", vocab_size=VOCABULARY.size), max_seqs=4)
    assert harness.play([harness.log("free", [5, 6, 8])])["free"].finish == "length"
    assert masks.UNDECIDED is not None


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("whom", ["children", "server"])
def test_rows_whose_processes_are_ended_or_stopped_have_the_tokens_that_they_would_have(
    remote, expected, monkeypatch, how: signal.Signals, whom: str
) -> None:
    """The rows wait while their masks are made elsewhere, and the others go on."""
    left = {3: 0, 9: 0, 15: 0}
    next_ = iter(left)
    end_at: int | None = next(next_)
    accepted = 0
    accept = RemoteMatcher.accept
    grammars: list[RemoteGrammar] = []
    init = RemoteGrammar.__init__

    def note(self: RemoteGrammar, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        grammars.append(self)

    def end_all(self: RemoteMatcher, token: int) -> bool:
        nonlocal accepted, end_at
        accepted += 1
        replaced = any(grammar._reopening is not None for grammar in grammars)  # a third end in a row fails
        if end_at is not None and accepted >= end_at and not replaced:
            end, end_at = end_at, next(next_, None)
            if remote._sandbox._process is None:  # it is being replaced, so nothing is left to be ended
                left[end] += 1
                return accept(self, token)
            server = remote._sandbox._process.pid
            children = map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())
            for pid in children if whom == "children" else [server]:
                left[end] += 1
                with suppress(ProcessLookupError):
                    os.kill(pid, how)
        return accept(self, token)

    monkeypatch.setattr(RemoteMatcher, "accept", end_all)
    monkeypatch.setattr(RemoteGrammar, "__init__", note)
    assert tokens_of(played(remote)[0]) == expected
    assert grammars
    assert all(left.values())
