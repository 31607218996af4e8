"""The engine core's process with a planted fault: `python faulty_core.py FAULT FOLDER FD`.

FAULT is `crash@N` or `hang@N` (at the Nth step of the process, and only once: a file in FOLDER remembers it),
`poison:TOKEN` (whenever a sequence with this token in its prompt is admitted), `load` (it cannot load),
`killed` or `broken` (while it loads), `ahead` (a spare process cannot load; a file in FOLDER tells).
"""

import os
import signal
import sys
import threading
from pathlib import Path

from personae.actors.enginecore import core
from personae.engine.step import StepEngine
from personae.errors import ModelLoadError

fault, folder = sys.argv[1], Path(sys.argv[2])
prepare = StepEngine.prepare
steps = 0


def faulty(self, plan, grammars):
    global steps
    steps += 1
    kind, _, number = fault.replace(":", "@").partition("@")
    done = folder / "done"
    if kind == "poison":
        if any(int(number) in admission.log.tokens for admission in plan.admissions):
            raise RuntimeError("planted: poison")
    elif kind in ("crash", "hang") and steps == int(number) and not done.exists():
        done.touch()
        if kind == "crash":
            raise RuntimeError("planted: the device is gone")
        threading.Event().wait()
    return prepare(self, plan, grammars)


def refuse(options, on_progress, **_):
    raise ModelLoadError("planted: no such weights")


def die(options, on_progress, **_):
    os.kill(os.getpid(), signal.SIGKILL)


def stumble(options, on_progress, **_):
    raise RuntimeError("planted: a bug")


def refuse_ahead(options, on_progress=None, *, wait=None, **more):
    if wait is not None:
        (folder / "refused").touch()
        raise ModelLoadError("planted: no memory")
    return assemble(options, on_progress, **more)


StepEngine.prepare = faulty
assemble = core.assemble
faults = {"load": refuse, "killed": die, "broken": stumble, "ahead": refuse_ahead}
core.assemble = faults.get(fault, assemble)
core.main()
