"""Compiles run on several threads at once."""

import ast
import os
import sys
import threading
from pathlib import Path

import pytest

from personae.grammar.budget.build import _LOW_PRIORITY

GRAMMAR = Path(__file__).resolve().parents[2] / "grammar"
# Run alone: the fork server and its children.
ALONE = {("forkserver.py", "main"), ("forkserver.py", "_answer"), ("checker.py", "main")}


def test_no_type_is_first_read_by_msgspec_while_threads_decode_it() -> None:
    """`decode(…, type=…)` reads a type when it is first used; two threads that do so at once can crash the
    process. Decoders are made when their module is imported."""
    found = []
    for path in sorted(GRAMMAR.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and (path.name, function.name) not in ALONE:
                found += [
                    f"{path.name}:{call.lineno}"
                    for call in ast.walk(function)
                    if isinstance(call, ast.Call)
                    and isinstance(call.func, ast.Attribute)
                    and call.func.attr in ("decode", "convert", "Decoder")
                    and (any(word.arg == "type" for word in call.keywords) or call.func.attr == "Decoder")
                ]
    assert found == []


@pytest.mark.skipif(sys.platform != "linux", reason="where threads have priorities of their own")
def test_what_is_not_small_is_compiled_behind_the_steps() -> None:
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    niceness = _LOW_PRIORITY.submit(
        lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    ).result()
    assert niceness == min(usual + 5, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == usual
