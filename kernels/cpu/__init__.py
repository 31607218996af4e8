"""The operators for x86 and other CPUs: C++, compiled on each machine for that machine.

`make setup` compiles it, or else the first use does. Without a C++ compiler the torch reference runs.
"""

import torch

from personae.kernels.registry import Implementation

BFLOAT16 = frozenset({torch.bfloat16})


def operators() -> dict[str, Implementation]:
    """The operators of this backend by name; empty if they cannot be built."""
    from personae.kernels.cpu.build import library

    handle = library()
    if handle is None:
        return {}
    from personae.kernels.cpu.calls import CpuOperators

    found = CpuOperators(handle).by_name()
    if handle.personae_has_decoder():
        from personae.kernels.cpu.fused import Fused

        fused = Fused(handle)
        found["fuse"] = Implementation(fused.take, BFLOAT16)
        found["packed_layout"] = Implementation(fused.layout, BFLOAT16)
        found["pack_linear"] = Implementation(fused.pack_linear, BFLOAT16)
        found["grouped_linear"] = Implementation(fused.grouped_linear, BFLOAT16)
        found["lookup"] = Implementation(fused.lookup, BFLOAT16)
    return found
