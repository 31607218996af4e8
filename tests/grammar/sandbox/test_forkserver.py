"""Specs that would exhaust the server's time or memory use up their own; others compile in parallel."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from patience import PATIENCE, eventually

from personae.errors import GrammarError, Overloaded
from personae.evals.hostile import alternatives, complements, laughs, wide
from personae.grammar.backend import BoundGrammar
from personae.grammar.budget.analysis import CompilePlan
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.sandbox.children import Starvation
from personae.grammar.sandbox.forkserver import Sandbox
from personae.grammar.sandbox.masks import RemoteGrammar
from personae.grammar.sandbox.server import ChildEnded, SandboxLimits
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import Concat, Exactly, Json, structure_spec
from personae.grammar.vocabulary import Vocabulary

VOCABULARY = Vocabulary((*(bytes([byte]) for byte in range(256)), b"", b""), (256,), {"<tool>": 257})


def spec_of(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def conditions(count: int) -> Any:
    """A schema whose alternatives double with each of its conditions."""
    one = [
        {"if": {"properties": {f"k{n}": {"const": 1}}}, "then": {"required": [f"r{n}"]}} for n in range(count)
    ]
    return {"allOf": one}


GOOD = spec_of({"type": "object", "properties": {"a": {"type": "string", "pattern": "^(x|y)*$"}}})
REWRITTEN = spec_of({"allOf": [{"type": "integer", "minimum": 3}, {"not": {"const": 4}}]})
BOMB = spec_of(complements(8, 8))
# What takes long runs on idle cores alone: on a busy machine half a second of work may take minutes, and
# seconds with a larger share than the usual.
PATIENT = SandboxLimits(processor=0.5, memory=2**28, patience=600.0, idle=0.5, share=0.25)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(VOCABULARY, PATIENT)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def here() -> GrammarCompiler:
    return GrammarCompiler(VOCABULARY, sandboxed=False)


@pytest.mark.parametrize(
    "spec",
    [
        GOOD,
        REWRITTEN,
        spec_of({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"enum": ["é", 1]}}}}),
        GrammarSpec("ebnf", 'root ::= "a" | "b"'),
        GrammarSpec("lark", 'start: "a" /b+/'),
        GrammarSpec("choice", '["b", "bc"]'),
    ],
    ids=lambda spec: spec.kind,
)
def test_what_comes_back_is_what_compiling_here_comes_to(
    sandbox: Sandbox, here: GrammarCompiler, spec: GrammarSpec
) -> None:
    there: list[CompilePlan] = []
    analysis = sandbox.analyse(spec, report=there.append)
    assert analysis == here.analyse(spec)
    assert there[-1] == analysis.compile_plan


@pytest.mark.parametrize(
    "wrong", [spec_of({"type": "nothing"}), GrammarSpec("regex", "(a"), spec_of({"$ref": "#/nowhere"})]
)
def test_what_is_refused_here_is_refused_there_in_the_same_words(
    sandbox: Sandbox, here: GrammarCompiler, wrong: GrammarSpec
) -> None:
    with pytest.raises(GrammarError) as there:
        sandbox.analyse(wrong)
    with pytest.raises(GrammarError) as refused:
        here.analyse(wrong)
    assert str(there.value) == str(refused.value)
    assert (there.value.param, there.value.code) == (refused.value.param, refused.value.code)


def test_keywords_that_have_to_go_are_found_there_and_only_if_checks_fail_too(
    sandbox: Sandbox, here: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(VOCABULARY, limits=PATIENT)
    asked: list[GrammarSpec] = []
    explain = compiler._sandbox.explain
    monkeypatch.setattr(compiler._sandbox, "explain", lambda *of: asked.append(of[0]) or explain(*of))
    names = {"propertyNames": {"pattern": r"^(a+)\1$"}, "maxProperties": 3}
    assert isinstance(compiler.compile(spec_of({"type": "object", **names})), RemoteGrammar)
    assert asked == []
    impossible = spec_of({"type": "object", "minProperties": 1, **names, "not": {"type": "object"}})
    with pytest.raises(GrammarError) as refused:
        compiler.compile(impossible)
    compiler.close()
    assert asked == [impossible]
    with pytest.raises(GrammarError) as refused_here:
        here.compile(impossible)
    assert str(refused.value) == str(refused_here.value)
    assert "#/propertyNames" in str(refused.value)
    assert "#/not" in str(refused.value)


def test_a_bomb_ends_by_itself_and_others_are_compiled_meanwhile(sandbox: Sandbox) -> None:
    sandbox.analyse(GOOD)
    refused: list[GrammarError] = []

    def light() -> None:
        try:
            sandbox.analyse(BOMB)
        except GrammarError as error:
            refused.append(error)

    bomb = threading.Thread(target=light, daemon=True)
    bomb.start()
    assert sandbox.analyse(GOOD).plan
    bomb.join(PATIENT.wall)
    [error] = refused
    assert (error.code, error.param) == ("grammar_too_complex", "response_format.json_schema.schema")
    assert sandbox.analyse(GOOD).plan


def test_memory_is_a_limit_of_its_own() -> None:
    small = Sandbox(VOCABULARY, SandboxLimits(processor=60.0, memory=2**25, patience=300.0))
    assert small.analyse(GOOD).plan
    with pytest.raises(GrammarError, match="limits"):
        small.analyse(BOMB)
    small.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_library_that_finds_no_memory_is_not_asked_to_say_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saying so takes memory: Rust's runtime then fails within its failing, and waits for its own lock."""
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    monkeypatch.setenv("RUST_LIB_BACKTRACE", "full")
    sandbox = Sandbox(VOCABULARY, PATIENT)
    sandbox.analyse(GOOD)
    assert sandbox._process is not None
    delivered = Path(f"/proc/{sandbox._process.pid}/environ").read_bytes().split(b"\0")
    assert [one for one in delivered if b"BACKTRACE" in one] == [b"RUST_BACKTRACE=0"]
    sandbox.close()


def standing(sandbox: Sandbox, fewest: int = 2, but: Set[int] = frozenset()) -> set[int]:
    """The server's children but those, when there are so many."""
    others: set[int] = set()

    def enough() -> bool:
        if sandbox._process is not None:
            server = sandbox._process.pid
            with suppress(FileNotFoundError):
                found = Path(f"/proc/{server}/task/{server}/children").read_text().split()
                others.clear()
                others.update(set(map(int, found)) - but)
        return len(others) >= fewest

    eventually(enough, "children stand by")
    return others


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_children_stand_by_before_anybody_asks_and_others_take_their_places() -> None:
    sandbox = Sandbox(VOCABULARY, PATIENT)
    sandbox.start()
    first = standing(sandbox)
    assert sandbox.analyse(GOOD).plan
    second = standing(sandbox, 1, but=first)
    for pid in first | second:  # by whatever hand
        with suppress(ProcessLookupError):  # the one that has answered
            os.kill(pid, signal.SIGKILL)
    assert sandbox.analyse(GOOD).plan
    last = standing(sandbox, but=first | second)
    sandbox.close()
    eventually(lambda: not any(Path(f"/proc/{pid}/stat").exists() for pid in last), "they end with it")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_child_that_has_answered_answers_again_within_the_same_limits() -> None:
    # on a busy machine requests take long and come late, which ends their children
    sandbox = Sandbox(VOCABULARY, structs.replace(PATIENT, ordinary=10.0, idle=600.0))
    assert sandbox.analyse(GOOD).plan
    seen = standing(sandbox)
    for _ in range(12):
        assert sandbox.analyse(GOOD).plan
        seen |= standing(sandbox)
    assert len(seen) < 8
    with pytest.raises(GrammarError, match="limits"):
        sandbox.analyse(BOMB)
    assert sandbox.analyse(GOOD).plan
    sandbox.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_child_that_has_grown_ends_when_it_has_answered() -> None:
    # whatever it has is too much
    sandbox = Sandbox(VOCABULARY, structs.replace(PATIENT, size_estimate=-(2**40)))
    sandbox.start()
    first = standing(sandbox)
    assert sandbox.analyse(GOOD).plan
    eventually(lambda: not first <= standing(sandbox), "it ends")
    assert sandbox.analyse(GOOD).plan
    sandbox.close()


def given_way(children: Set[int]) -> set[int]:
    """Those that run only on idle cores."""
    found = set()
    for pid in children:
        with suppress(ProcessLookupError):
            if os.sched_getscheduler(pid) == os.SCHED_IDLE:
                found.add(pid)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="SCHED_IDLE is Linux's")
def test_a_spec_that_takes_long_gives_way_to_everybody_and_its_child_takes_no_other() -> None:
    sandbox = Sandbox(VOCABULARY, PATIENT)
    assert sandbox.analyse(GOOD).plan
    assert not given_way(standing(sandbox))
    asked = sandbox.ask(b"a", msgspec.msgpack.encode((BOMB, True, None)))
    next(asked)
    eventually(lambda: given_way(standing(sandbox)), "it gives way")
    assert sandbox.analyse(GOOD).plan
    assert len(given_way(standing(sandbox))) <= 1
    with pytest.raises(ChildEnded) as ended:
        list(asked)
    assert ended.value.exceeded
    long = spec_of({"enum": [f"value {n}" for n in range(5_000)]})  # answered, and not within milliseconds
    for _ in range(3):
        assert sandbox.analyse(long).plan
    eventually(lambda: not given_way(standing(sandbox)), "nobody who waits for a spec has given way")
    assert sandbox.analyse(GOOD).plan
    sandbox.close()


@pytest.fixture
def busy_cores() -> Iterator[None]:
    """A program that leaves no core idle."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    yield
    for program in programs:
        program.kill()
        program.wait()


def lowered(children: Set[int]) -> set[int]:
    """Those that run at a low priority, and not only on idle cores."""
    found = set()
    for pid in children:
        with suppress(ProcessLookupError):
            niceness = os.getpriority(os.PRIO_PROCESS, pid) - os.getpriority(os.PRIO_PROCESS, 0)
            if niceness >= 10 and os.sched_getscheduler(pid) == os.SCHED_OTHER:
                found.add(pid)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="SCHED_IDLE is Linux's")
@pytest.mark.usefixtures("busy_cores")
def test_a_spec_that_gets_nothing_of_busy_cores_is_compiled_at_a_low_priority() -> None:
    sandbox = Sandbox(VOCABULARY, structs.replace(PATIENT, processor=60.0))
    assert sandbox.analyse(GOOD).plan

    def light() -> None:
        with suppress(GrammarError, Overloaded):
            sandbox.analyse(BOMB)

    bomb = threading.Thread(target=light, daemon=True)
    bomb.start()
    eventually(lambda: given_way(standing(sandbox)), "it gives way")
    eventually(lambda: lowered(standing(sandbox)), "another one has its request, and a share of a core")
    assert sandbox.analyse(GOOD).plan
    sandbox.limits = structs.replace(PATIENT, patience=0.0)  # it is not asked again
    sandbox.close()


def test_starving_is_getting_less_than_a_share_for_a_second_although_somebody_wants_to_run() -> None:
    starvation = Starvation(0.05)
    assert not starvation.observe(0.0, {1: 7.0, 2: 3.0}, waiting=True)
    assert not starvation.observe(0.9, {1: 7.0, 2: 3.0}, waiting=True), "not for a second"
    assert starvation.observe(1.1, {1: 7.01, 2: 3.02}, waiting=True)
    assert not starvation.observe(1.3, {1: 7.01, 2: 3.02}, waiting=True), "it begins anew"
    assert not starvation.observe(2.4, {1: 7.03, 2: 3.06}, waiting=True), "together they have enough"
    assert not starvation.observe(2.5, {1: 7.03}, waiting=True)
    assert not starvation.observe(3.2, {1: 7.03, 3: 50.0}, waiting=False), "nobody wants to"
    assert not starvation.observe(3.3, {1: 7.03, 3: 50.0}, waiting=True)
    starvation.restart()
    assert not starvation.observe(3.4, {1: 7.03, 3: 50.0}, waiting=True), "one has done its work"
    assert starvation.observe(4.5, {1: 7.03, 3: 50.0, 4: 9.0}, waiting=True), "what it had before is no gain"


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("whom", ["child", "server"])
def test_a_spec_whose_process_is_ended_from_outside_is_compiled_in_another_and_not_blamed(
    how: signal.Signals, whom: str
) -> None:
    sandbox = Sandbox(VOCABULARY, structs.replace(PATIENT, processor=60.0))
    long = spec_of({"enum": [f"value {n}" for n in range(5_000)]})
    asked = sandbox.ask(b"a", msgspec.msgpack.encode((long, True, None)))
    next(asked)
    assert sandbox._process is not None
    for pid in standing(sandbox) if whom == "child" else [sandbox._process.pid]:
        os.kill(pid, how)
    assert len([frame for frame in asked if frame]) >= 2, "a plan and an analysis, at least"
    assert sandbox.analyse(GOOD).plan
    sandbox.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_spec_that_a_child_had_not_taken_when_it_was_killed_goes_to_another_and_that_is_no_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("personae.grammar.sandbox.server.ATTEMPTS", 1)
    sandbox = Sandbox(VOCABULARY, PATIENT)
    sandbox.start()
    for pid in (standing_by := standing(sandbox)):
        os.kill(pid, signal.SIGSTOP)
    asked = sandbox.ask(b"a", msgspec.msgpack.encode((GOOD, True, None)))
    killer = threading.Timer(0.1, lambda: [os.kill(pid, signal.SIGKILL) for pid in standing_by])
    killer.start()
    assert len([frame for frame in asked if frame]) >= 1
    sandbox.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_stopped_child_is_ended_although_nobody_waits_for_it() -> None:
    sandbox = Sandbox(VOCABULARY, PATIENT)
    sandbox.start()
    first = standing(sandbox)
    for pid in first:
        os.kill(pid, signal.SIGSTOP)
    eventually(lambda: not first & standing(sandbox), "others stand by")
    sandbox.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_children_leave_when_they_are_idle_and_new_ones_have_no_more_memory_than_at_first() -> None:
    sandbox = Sandbox(VOCABULARY, PATIENT)
    sandbox.start()
    first = standing(sandbox)
    used = [sandbox.masks(GrammarSpec("ebnf", f'root ::= "{n}"')) for n in range(6)]
    assert len(standing(sandbox)) >= 6
    assert sandbox._process is not None
    pages = Path(f"/proc/{sandbox._process.pid}/maps").read_text()
    assert "xgrammar" in pages, "it is imported before a child is forked"
    assert "libtorch" not in pages
    del used
    eventually(lambda: not first & standing(sandbox) and len(standing(sandbox)) == 2, "new ones stand by")
    sandbox.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_child_copies_little_of_what_it_shares_with_the_server() -> None:
    """The collector does not write to all objects of the server's libraries (`gc.freeze`)."""
    sandbox = Sandbox(VOCABULARY, structs.replace(PATIENT, idle=60.0))
    for _ in range(4):
        assert sandbox.analyse(GOOD).plan
        time.sleep(0.1)  # it collects after it has answered
    for pid in standing(sandbox):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        [dirty] = [int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")]
        assert dirty < 12 * 1024
    sandbox.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_all_processes_together_have_a_bound_and_the_largest_is_to_blame() -> None:
    limits = structs.replace(PATIENT, processor=60.0, memory=2**31, memory_of_all=2**27)
    sandbox = Sandbox(VOCABULARY, limits)
    small = sandbox.masks(GrammarSpec("ebnf", 'root ::= "a"'))
    with pytest.raises(GrammarError, match="limits on time and memory"):
        sandbox.analyse(BOMB)
    assert not small.ended
    sandbox.close()


def test_a_spec_that_only_lacked_a_processor_is_not_called_too_complex() -> None:
    hurried = Sandbox(VOCABULARY, structs.replace(PATIENT, processor=600.0, memory=2**34, patience=4.0))

    def drafted() -> bool:
        with suppress(Overloaded):
            return hurried.analyse(GOOD).plan is not None
        return False

    eventually(drafted, "children stand by")
    with pytest.raises(Overloaded):
        hurried.analyse(spec_of(conditions(40)))
    hurried.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_children_beyond_those_that_are_kept_end_although_younger_ones_stand_by() -> None:
    sandbox = Sandbox(VOCABULARY, PATIENT)
    longer_than_a_line_holds = msgspec.msgpack.encode((spec_of({"enum": [1, "x" * 2**18]}), True, None))
    asked = [sandbox.ask(b"a", longer_than_a_line_holds) for _ in range(6)]
    for child in asked:
        next(child)  # it is busy until it is heard to the end
    for child in asked:
        assert list(child)
    eventually(lambda: len(standing(sandbox)) <= 4, "the others end")
    assert sandbox.analyse(GOOD).plan
    sandbox.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_warm_compiler_has_them_before_its_first_spec() -> None:
    compiler = GrammarCompiler(VOCABULARY)
    assert compiler._sandbox is not None
    assert compiler._sandbox._process is None
    compiler.warm_up()
    standing(compiler._sandbox)
    assert compiler.compile(GOOD).shortest
    compiler.close()


def test_a_server_that_has_died_is_begun_again_and_who_waits_too_long_may_come_again() -> None:
    sandbox = Sandbox(VOCABULARY, PATIENT)
    sandbox.close()
    sandbox.analyse(GOOD)
    assert sandbox._process is not None
    os.kill(sandbox._process.pid, signal.SIGKILL)
    sandbox._process.wait(PATIENCE)
    assert sandbox.analyse(GOOD).plan
    sandbox.close()
    sandbox.close()
    hurried = Sandbox(VOCABULARY, SandboxLimits(patience=0.001))
    with pytest.raises(Overloaded):
        hurried.analyse(GOOD)
    hurried.close()


def test_only_what_is_not_small_or_has_to_be_rewritten_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[GrammarSpec] = []
    compiler = GrammarCompiler(VOCABULARY)
    assert compiler._sandbox is not None
    inner = compiler._sandbox.analyse
    monkeypatch.setattr(
        compiler._sandbox, "analyse", lambda spec, **more: asked.append(spec) or inner(spec, **more)
    )
    compiler.compile(spec_of({"type": "object", "properties": {"n": {"type": "integer"}}}))
    assert asked == []
    for spec, first, not_first in ((GOOD, "{", "["), (REWRITTEN, "5", "-")):
        assert compiler.compile(spec).matcher().accept(ord(first))
        assert not compiler.compile(spec).matcher().accept(ord(not_first))
    assert asked == [GOOD, GOOD, REWRITTEN, REWRITTEN]
    compiler.close()


def test_a_schema_whose_references_explode_is_refused_by_keyword_and_the_next_is_served(
    sandbox: Sandbox,
) -> None:
    with pytest.raises(GrammarError, match="'unevaluatedItems' at #/"):
        sandbox.analyse(spec_of(laughs(40)))
    assert sandbox.analyse(REWRITTEN).plan


def accepts(grammar: BoundGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.accept(token) for token in (*text.encode(), VOCABULARY.stop_ids[0]))


def test_what_is_too_complex_and_not_strict_is_bound_as_far_as_can_be() -> None:
    compiler = GrammarCompiler(VOCABULARY, limits=PATIENT)
    once_rewritten = {"type": "array", "maxItems": 1, "items": {"allOf": complements(8, 8)["allOf"]}}
    for strict in (True, False):
        spec = GrammarSpec("json_schema", json.dumps(once_rewritten), strict)
        if strict:
            with pytest.raises(GrammarError, match="limits"):
                compiler.compile_here(spec)
            continue
        as_written = compiler.compile(spec)
        assert accepts(as_written, "[[[1]]]")
        assert not accepts(as_written, "[1,2]")
    too_wide = {"type": "object"} | alternatives(50, 400)
    by_type = compiler.compile(GrammarSpec("json_schema", json.dumps(too_wide), strict=False))
    assert accepts(by_type, '{"anything":1}')
    assert not accepts(by_type, "[]")
    compiler.close()


def test_so_is_what_is_too_complex_over_the_models_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(VOCABULARY)
    inner = compiler._backends.get("llguidance").compile

    def compile(spec: GrammarSpec) -> Any:
        if "patternProperties" in spec.source:
            raise GrammarError("lexer error: too many expressions constructed")
        return inner(spec)

    monkeypatch.setattr(compiler._backends.get("llguidance"), "compile", compile)
    schema = {"type": "object", "patternProperties": {"[a-z_.:]{1,255}": {"format": "uri"}}}
    with pytest.raises(GrammarError, match="lexer error") as refused:
        compiler.compile_here(spec_of(schema))
    assert refused.value.code == "grammar_too_complex", "so checks may bind it"
    by_type = compiler.compile(GrammarSpec("json_schema", json.dumps(schema), strict=False))
    assert accepts(by_type, '{"anything":1}')
    assert not accepts(by_type, "[]")
    compiler.close()


def test_so_is_a_function_whose_parameters_are_too_complex_unless_it_is_strict() -> None:
    compiler = GrammarCompiler(VOCABULARY, limits=PATIENT)
    bomb, good = json.loads(BOMB.source), {"type": "array", "items": {"const": 1}, "minItems": 1}
    call = compiler.compile(
        structure_spec(Concat((Exactly("f"), Json(bomb, False, "tools[0]"), Json(good, True, "tools[1]"))))
    )
    assert accepts(call, 'f{"anything":1}[1]')
    assert not accepts(call, "f{}[2]")
    with pytest.raises(GrammarError, match="limits"):
        compiler.compile(structure_spec(Concat((Exactly("f"), Json(bomb, True, "tools[0]")))))
    compiler.close()


@pytest.mark.parametrize("strict", [True, False])
def test_no_answer_is_begun_that_is_too_long_for_a_complete_one_to_be_found(strict: bool) -> None:
    compiler = GrammarCompiler(VOCABULARY)
    spec = GrammarSpec("json_schema", json.dumps(wide(4000)), strict)
    if strict:
        with pytest.raises(GrammarError, match="at least 74891 characters") as refused:
            compiler.compile(spec)
        assert refused.value.code == "grammar_too_complex"
    else:
        assert compiler.compile(spec).shortest == len("{}")
    compiler.close()
