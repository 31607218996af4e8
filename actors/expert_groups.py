"""The options that divide a model's experts among ranks."""

from personae.actors.options import ModelOptions
from personae.engine.parallel.expert_placement import ExpertGroups
from personae.errors import LoadError


def expert_groups(options: ModelOptions) -> ExpertGroups:
    """How the ranks that share a layer divide its experts. Raises LoadError for options that contradict each
    other."""
    groups, size, copies = (
        options.expert_parallel_size,
        options.tensor_parallel_size,
        options.num_redundant_experts,
    )
    if size % groups:
        raise LoadError(
            f"--expert-parallel-size {groups}: it must divide --tensor-parallel-size, which is {size}."
        )
    if not options.enable_eplb:
        if copies is not None:
            raise LoadError(f"--num-redundant-experts {copies} needs --enable-eplb.")
        return ExpertGroups(groups)
    if groups == 1:
        raise LoadError("--enable-eplb needs an --expert-parallel-size of 2 or more.")
    if copies is not None and copies % groups:
        raise LoadError(
            f"--num-redundant-experts {copies}: it must be a multiple of --expert-parallel-size, which is "
            f"{groups}."
        )
    return ExpertGroups(groups, 1 if copies is None else copies // groups)
