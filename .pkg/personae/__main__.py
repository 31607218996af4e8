"""The `personae` command, and `python -m personae`."""

import gc
import sys

from personae.actors.spawn import ahead

_WITHOUT_ENGINE = ("--help", "--dry-run", "--one-process", "--ray", "--replicas", "--max-replicas")


def main() -> None:
    """Runs the command. `serve` begins with its engine's process, before it imports what reads its options:
    both take a second."""
    if sys.argv[1:2] == ["serve"]:
        gc.disable()  # until it is ready: what is imported is no garbage
    if sys.argv[1:2] == ["serve"] and not any(one.startswith(_WITHOUT_ENGINE) for one in sys.argv):
        with ahead():
            _run()
    else:
        _run()


def _run() -> None:
    from personae.api.cli import main

    main()


if __name__ == "__main__":
    main()
