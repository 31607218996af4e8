"""What engines would take, computed in a process of its own: the frontend has no torch.

    python -m personae.api.base_models.measure

reads the engines' options from its stdin, and writes a size or a refusal for each to its stdout.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

import anyio
import msgspec

from personae.actors.framing import decoder, encode
from personae.actors.options import EngineOptions
from personae.errors import LoadError

PROCESS_BYTES = 2**29
"""What an engine's process takes besides its model: the interpreter, torch, and a step's tensors."""

_COMMAND = (sys.executable, "-m", "personae.api.base_models.measure")


class Measured(msgspec.Struct, frozen=True):
    """The memory that an engine needs, in bytes, and the longest sequence, in tokens; or why it would refuse
    its options."""

    bytes: int = 0
    max_model_len: int = 0
    refusal: str | None = None


async def measured(options: Sequence[EngineOptions]) -> list[Measured]:
    """What each engine would take, by the headers of its files. Raises LoadError for what an engine would
    refuse."""
    done = await anyio.run_process(
        _COMMAND,
        input=encode(list(options)),
        stderr=subprocess.PIPE,
        check=False,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise LoadError(f"The models could not be measured, exit code {done.returncode}: {words[:500]}")
    found: list[Measured] = msgspec.msgpack.decode(done.stdout, type=list[Measured])
    for each in found:
        if each.refusal is not None:
            raise LoadError(each.refusal)
    return found


def main() -> None:
    """Answer for all engines."""
    options: list[EngineOptions] = decoder(list[EngineOptions]).decode(sys.stdin.buffer.read())
    sys.stdout.buffer.write(msgspec.msgpack.encode([_measured(each) for each in options]))


def _measured(options: EngineOptions) -> Measured:
    from personae.actors.assembly import chosen_device
    from personae.actors.footprint import footprint

    try:
        found = footprint(options, chosen_device(options.device))
    except LoadError as error:
        return Measured(refusal=error.message)
    return Measured(found.needed_bytes + PROCESS_BYTES, found.max_model_len)


if __name__ == "__main__":
    main()
