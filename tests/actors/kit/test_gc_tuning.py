"""The garbage collector skips what a process has loaded; it finds later garbage."""

import subprocess
import sys
from pathlib import Path

from patience import PATIENCE

PACKAGES = Path(__file__).resolve().parents[3] / ".pkg"
SCRIPT = """
import gc, weakref
from personae.actors.kit.gc_tuning import spare_what_is_here

class Node:
    def __init__(self): self.me = self

old, garbage = [Node() for _ in range(1000)], weakref.ref(Node())
spare_what_is_here()
new = weakref.ref(Node())
print(garbage() is None, any(type(thing) is Node and thing is not new() for thing in gc.get_objects()))
gc.collect()
print(new() is None, len(old))
"""


def test_loaded_objects_are_excluded_after_garbage_is_collected_and_later_cycles_are_found() -> None:
    command = [sys.executable, "-c", SCRIPT]
    delivered = subprocess.run(
        command, env={"PYTHONPATH": str(PACKAGES)}, capture_output=True, check=True, timeout=PATIENCE
    )
    assert delivered.stdout.split() == [b"True", b"False", b"True", b"1000"]
