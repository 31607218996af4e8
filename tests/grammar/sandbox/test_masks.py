"""Masks of grammars that clients write: made in a process of their own, which ends with what it may take."""

import gc
import json
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from patience import PATIENCE, eventually

from personae.errors import GRAMMAR_DELAYED, GRAMMAR_TOO_SLOW, GrammarError, Overloaded
from personae.grammar.bitmask import allow_only, allows, words_of
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.sandbox.forkserver import Sandbox
from personae.grammar.sandbox.mask_server import (
    Ask,
    BeginAnswer,
    End,
    Mask,
    MaskServer,
    Take,
    TokenRefused,
    TooSlow,
)
from personae.grammar.sandbox.masks import Processes, RemoteGrammar, RemoteMatcher
from personae.grammar.sandbox.server import ATTEMPTS, SandboxLimits, end_frame
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary

VOCABULARY = Vocabulary((*(bytes([byte]) for byte in range(256)), *[b"ab" * 20] * 64, b""), (320,), {})
AMBIGUOUS = GrammarSpec("ebnf", "root ::= s\ns ::= s s | s s s | [a-z] | [a-z] s | s [a-z]")
WORD = GrammarSpec("ebnf", "root ::= [a-z]+")
PATIENT = SandboxLimits(patience=PATIENCE, mask=0.3, mask_wall=PATIENCE, idle=0.2, share=0.25)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(VOCABULARY, PATIENT)
    yield sandbox
    sandbox.close()


@pytest.fixture
def compiler(sandbox: Sandbox) -> GrammarCompiler:
    compiler = GrammarCompiler(VOCABULARY)
    compiler._sandbox = sandbox
    return compiler


def mask_of(answer: RemoteMatcher) -> Any:
    eventually(lambda: answer.ready, "the mask has come")
    row = np.zeros((1, words_of(VOCABULARY.size)), np.int32)
    answer.fill(row, 0)
    return row[0]


def test_a_mask_that_takes_too_long_ends_its_answers_and_nobody_elses(compiler: GrammarCompiler) -> None:
    slow, quick = compiler.compile(AMBIGUOUS), compiler.compile(WORD)
    assert isinstance(slow, RemoteGrammar)
    assert isinstance(quick, RemoteGrammar)
    one, other = slow.begin(1000, ()), quick.begin(1000, ())
    for _ in range(60):
        assert allows(mask_of(other), ord("x"))
        other.accept(ord("x"))
        mask_of(one)
        if one.failure is not None:
            break
        one.accept(256)  # a long token: many readings
    assert one.failure is not None
    assert one.failure[1] == GRAMMAR_TOO_SLOW
    assert other.failure is None
    assert slow.ended
    assert not quick.ended


def test_a_grammar_whose_process_has_ended_is_compiled_again(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(WORD, "a")
    assert isinstance(grammar, RemoteGrammar)
    compiler.put(WORD, grammar, "a")
    assert compiler.get(WORD, "a") is grammar
    grammar._connection.shutdown(2)
    eventually(lambda: grammar.ended, "its process has ended")
    assert compiler.get(WORD, "a") is None
    assert compiler.cache.nbytes == 0


def test_its_process_ends_when_nobody_holds_the_grammar(compiler: GrammarCompiler) -> None:
    def children() -> int:
        server = compiler._sandbox._process.pid  # type: ignore[union-attr]  # it runs
        return len(Path(f"/proc/{server}/task/{server}/children").read_text().split())

    grammar = compiler.compile(WORD)
    assert compiler._processes.live == 1
    assert isinstance(grammar, RemoteGrammar)
    answer = grammar.begin(9, ())
    mask_of(answer)
    before = children()
    del grammar, answer
    eventually(lambda: children() < before, "it has ended")
    assert compiler._processes.live == 0


def processes(sandbox: Sandbox) -> tuple[int, list[int]]:
    """The fork server and its children."""
    assert sandbox._process is not None
    server = sandbox._process.pid
    return server, [*map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("whom", ["children", "server"])
def test_answers_go_on_with_the_same_masks_when_their_processes_are_ended_or_stopped(
    how: signal.Signals, whom: str
) -> None:
    compiler = GrammarCompiler(VOCABULARY, limits=structs.replace(PATIENT, mask=5.0))
    here = GrammarCompiler(VOCABULARY, sandboxed=False).compile_here(WORD)
    try:
        grammar = compiler.compile(WORD, "a")
        compiler.put(WORD, grammar, "a")
        assert isinstance(grammar, RemoteGrammar)
        answers = [(grammar.begin(9, ()), here.matcher(9)) for _ in range(3)]
        assert compiler._sandbox is not None
        points: list[Any] = []
        expected = np.zeros((1, words_of(VOCABULARY.size)), np.int32)
        for step, token in enumerate(b"abcdefg"):
            if step == 3:
                server, children = processes(compiler._sandbox)
                for pid in children if whom == "children" else [server]:
                    os.kill(pid, how)
            for remote, local in answers:
                local.fill(expected, 0)
                assert (mask_of(remote) == expected[0]).all()
                if step == 2:
                    points.append((remote.snapshot(), local.snapshot()))
                remote.accept(token)
                local.accept(token)
        for (remote, local), (there, point) in zip(answers, points, strict=True):
            remote.restore(there)
            local.restore(point)
            for token in b"xy":
                local.fill(expected, 0)
                assert (mask_of(remote) == expected[0]).all()
                remote.accept(token)
                local.accept(token)
        assert compiler.get(WORD, "a") is grammar
        for spec in (WORD, GrammarSpec("ebnf", 'root ::= "new"')):
            assert compiler.compile(spec, "a").shortest
    finally:
        compiler.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_an_answer_whose_processes_are_always_ended_fails_without_blame_for_its_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    opened: list[socket.socket] = []

    def reopen() -> tuple[socket.socket, int]:
        one, other = socket.socketpair()
        other.sendall(end_frame(signal.SIGKILL))
        opened.append(other)
        return one, 1

    answer = RemoteGrammar(ours, 1, reopen=reopen).begin(10, ())
    eventually(lambda: answer.ready, "it fails")
    assert answer.failure is not None
    why, code = answer.failure
    assert "again and again" in why
    assert code == GRAMMAR_DELAYED
    assert len(opened) == ATTEMPTS
    for other in opened:
        other.close()


def test_an_answer_waits_for_its_masks_for_a_bounded_time_in_all_of_its_processes() -> None:
    ours, theirs = socket.socketpair()
    others: list[socket.socket] = []

    def reopen() -> tuple[socket.socket, int]:
        one, other = socket.socketpair()
        others.append(other)
        return one, 1

    grammar = RemoteGrammar(ours, 1, reopen=reopen, wall=0.3)
    answer = grammar.begin(10, ())
    assert not answer.ready
    theirs.close()  # the time before counts
    eventually(lambda: answer.ready, "it fails")
    assert answer.failure is not None
    why, code = answer.failure
    assert "too busy" in why
    assert code == GRAMMAR_DELAYED
    for other in others:
        other.close()


def test_a_tenant_has_so_many_processes_and_what_it_does_not_use_makes_room(
    compiler: GrammarCompiler,
) -> None:
    compiler._processes = Processes(most=3, most_of_tenant=2, patience=0.1)
    specs = [GrammarSpec("ebnf", f'root ::= "{n}"') for n in range(4)]
    held = [compiler.compile(spec, "a") for spec in specs[:2]]
    with pytest.raises(Overloaded):
        compiler.compile(specs[2], "a")
    compiler.put(specs[0], held.pop(0), "a")
    third = compiler.compile(specs[2], "a")
    others = [compiler.compile(specs[0], "b")]
    with pytest.raises(Overloaded):
        others.append(compiler.compile(specs[1], "b"))
    assert compiler._processes.live == 3
    assert third.shortest == others[0].shortest == 1


def test_a_compile_waits_for_a_process_that_binds_an_answer_and_its_cached_grammar_stays(
    compiler: GrammarCompiler,
) -> None:
    compiler._processes = Processes(most_of_tenant=1)
    first = compiler.compile(WORD, "a")
    assert isinstance(first, RemoteGrammar)
    compiler.put(WORD, first, "a")
    answer = first.begin(9, ())
    compiler.cache.drop_processes("a")
    assert compiler.get(WORD, "a") is first
    found: list[Any] = []
    other = GrammarSpec("ebnf", 'root ::= "b"')
    waiting = Thread(target=lambda: found.append(compiler.compile(other, "a")))
    waiting.start()
    time.sleep(0.15)
    assert found == []
    answer.end()
    del first, answer
    waiting.join(PATIENCE)
    assert [one.shortest for one in found] == [1]
    assert compiler._processes.live == 1


def test_a_grammar_that_nobody_uses_has_no_process_and_is_made_again_for_the_next_answer() -> None:
    limits = structs.replace(PATIENT, kept=0.1)
    compiler = GrammarCompiler(VOCABULARY, limits=limits)
    try:
        grammar = compiler.compile(WORD)
        assert isinstance(grammar, RemoteGrammar)
        compiler.put(WORD, grammar)
        answer = grammar.begin(9, ())
        mask_of(answer)
        time.sleep(0.3)
        assert not grammar.ended, "an answer is here"
        answer.end()
        assert compiler.get(WORD) is grammar
        eventually(lambda: grammar.ended, "its process is free")
        answer = grammar.begin(9, ())
        assert allows(mask_of(answer), ord("x"))
        answer.end()
        eventually(lambda: compiler.get(WORD) is None, "it is free again")
    finally:
        compiler.close()


def test_a_grammar_that_cannot_be_compiled_is_refused_and_its_place_is_free(
    compiler: GrammarCompiler,
) -> None:
    with pytest.raises(GrammarError):
        compiler.compile(GrammarSpec("ebnf", "root ::= ("))
    with pytest.raises(GrammarError, match="matches no text"):
        compiler.compile(GrammarSpec("ebnf", "root ::= root"))
    assert compiler._processes.live == 0


def test_masks_are_those_that_the_library_makes_here(compiler: GrammarCompiler) -> None:
    here = GrammarCompiler(VOCABULARY, sandboxed=False).compile_here(WORD).matcher(6)
    remote = compiler.compile(WORD)
    assert isinstance(remote, RemoteGrammar)
    there = remote.begin(6, ())
    expected = np.zeros((1, words_of(VOCABULARY.size)), np.int32)
    for token in (*b"abcd", 320, 320):
        here.fill(expected, 0)
        assert (mask_of(there) == expected[0]).all()
        if allows(expected[0], token) and not here.terminated:
            here.accept(token)
            there.accept(token)


class Slow:
    """A grammar and its only answer, whose masks take their time."""

    shortest, nbytes, terminated, verifies = 1, 0, False, False

    def __init__(self) -> None:
        self.now = 0.0

    def matcher(self, budget: int | None = None) -> Any:
        return self

    def fill(self, bitmask: Any, row: int) -> None:
        self.now += 0.4
        allow_only(bitmask[row], [1])

    def accept(self, token: int) -> bool:
        return token == 1


def test_all_masks_of_an_answer_together_have_their_time() -> None:
    grammar = Slow()
    server = MaskServer(grammar, 32, SandboxLimits(mask=0.5, masks=1.0), lambda: grammar.now)  # type: ignore[arg-type]
    assert server.left(Take(0, 1)) == server.left(BeginAnswer(0, 10, ())) == 0.5
    assert server.left(BeginAnswer(0, 10, (1, 1))) == 1.0, "a replay has the time of all masks"
    (first,) = server.do(BeginAnswer(0, 10, (1, 1)))
    assert isinstance(first, Mask)
    assert not first.verifies
    (second,) = server.do(Take(0, 1))
    assert isinstance(second, Mask)
    assert server.left(Take(0, 1)) == pytest.approx(0.2)
    assert [*server.do(Take(0, 1))] == [TooSlow(0)]
    assert [*server.do(Take(0, 1))] == [*server.do(Ask(0, 1))] == []
    (other,) = server.do(BeginAnswer(1, 10, ()))
    assert isinstance(other, Mask), "another answer's time is its own"
    assert [*server.do(Take(1, 2))] == [TokenRefused(1, 2)]
    assert [*server.do(End(1))] == []
    assert server.left(Take(1, 1)) == 0.5


def test_a_long_answer_that_is_replayed_takes_longer_than_a_mask_and_goes_on() -> None:
    schema = {
        "type": "object",
        "properties": {"rows": {"type": "array", "items": {"type": "integer"}}, "count": {"type": "integer"}},
        "required": ["rows", "count"],
        "additionalProperties": False,
        "not": {"properties": {"count": {"multipleOf": 7}}},
    }
    spec = GrammarSpec("json_schema", json.dumps(schema), checked=True)
    limits = SandboxLimits(patience=PATIENCE, mask=0.1, mask_wall=PATIENCE, ordinary=PATIENCE)
    sandbox = Sandbox(VOCABULARY, limits)
    try:
        grammar = sandbox.masks(spec, lambda: None)
        written = json.dumps({"rows": [*range(300)], "count": 3}).encode()
        answer = grammar.begin(len(written) + 100, [*written[:-2]])
        mask = mask_of(answer)
        assert answer.failure is None
        assert allows(mask, ord("3"))
        assert not allows(mask, ord("x"))
    finally:
        sandbox.close()


def test_a_wait_for_a_mask_is_short_and_is_not_repeated_for_ever() -> None:
    ours, theirs = socket.socketpair()
    answer = RemoteGrammar(ours, 1).begin(10, ())
    for _ in range(50):
        assert not answer.wait(time.monotonic() + 0.005)
    waited: list[float] = []
    answer._grammar.wait = waited.append  # type: ignore[method-assign]
    assert not answer.wait(time.monotonic() + PATIENCE), "its patience is used up: it does not wait at all"
    assert waited == []
    theirs.close()


def test_a_grammar_that_only_the_garbage_collector_finds_closes_its_connection() -> None:
    ours, theirs = socket.socketpair()
    left: list[None] = []
    circle: list[object] = [RemoteGrammar(ours, 1, lambda: left.append(None))]
    circle.append(circle)
    del ours
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del circle
        gc.collect()
    with theirs:
        assert theirs.recv(1) == b""
    assert left == [None]
    assert not [one for one in caught if one.category is ResourceWarning]
