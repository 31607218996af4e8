"""A rank's process in which one function finds no memory; and how a test has ranks started by a file of its
own.

`failing_at` has the ranks of a test's process started so.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Never

import pytest
import torch

_HERE = Path(__file__).resolve()


@contextmanager
def started_by(script: Path, folder: Path, *arguments: str) -> Iterator[None]:
    """Python processes that start meanwhile run this file, with these arguments before their own."""
    python = folder / "python"
    command = " ".join([sys.executable, str(script), *arguments])
    python.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    with pytest.MonkeyPatch.context() as running:
        running.setattr(sys, "executable", str(python))
        yield


def failing_at(function: str, folder: Path) -> AbstractContextManager[None]:
    """The ranks that start meanwhile have no memory in this function of `engine/parallel/process.py`."""
    return started_by(_HERE, folder, function)


def main(function: str, asked: str, module: str, *arguments: str) -> None:
    """Run a rank's process."""
    from personae.engine.parallel import process

    def fail(*_given: object, **_options: object) -> Never:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    assert (asked, module) == ("-m", process.__name__)
    setattr(process, function, fail)
    sys.argv = [module, *arguments]
    process.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
