"""Whether the ranks of a model have processor cores of their own."""

from personae.actors.options import EngineOptions
from personae.kernels.cgroup import usable_cores


def shared_cores(options: EngineOptions) -> str | None:
    """A sentence about the ranks on this machine that have no core of their own; None if all have one. They
    work, but slowly: each sum waits until the last of them had its turn."""
    size, stages = options.tensor_parallel_size, options.pipeline_parallel_size
    ranks = size * (stages if options.far_stages is None and options.nnodes == 1 else 1)
    cores = max(int(usable_cores()), 1)
    if ranks == 1 or ranks <= cores:
        return None
    without = f"rank {cores} has none of its own"
    if ranks > cores + 1:
        without = f"ranks {cores} to {ranks - 1} have none of their own"
    shared = "1 processor core" if cores == 1 else f"{cores} processor cores"
    return f"the model's {ranks} ranks share {shared}: {without}, and all wait for the slowest"
