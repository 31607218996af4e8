"""The options that say which parts of a model ranks have, and what carries what they exchange."""

import torch

from personae.actors.options import ModelOptions
from personae.engine.parallel.expert_placement import ExpertGroups
from personae.engine.parallel.process_groups import Library
from personae.errors import LoadError
from personae.kernels.devices import visible_devices


def expert_groups(options: ModelOptions) -> ExpertGroups:
    """How the ranks that share a layer divide its experts. Raises LoadError for options that contradict each
    other."""
    groups, size, copies = (
        options.expert_parallel_size,
        options.tensor_parallel_size,
        options.num_redundant_experts,
    )
    others = size - attention_ranks(options)
    if (others or size) % groups:
        of = (
            f"the {others} ranks without attention"
            if 0 < others < size
            else f"--tensor-parallel-size, which is {size}"
        )
        raise LoadError(f"--expert-parallel-size {groups}: it must divide {of}.")
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


def two_batches(options: ModelOptions) -> bool:
    """Whether the halves of a step take turns. Raises LoadError for options that contradict each other."""
    if options.enable_two_batch_overlap and options.tensor_parallel_size == 1:
        raise LoadError("--enable-two-batch-overlap needs a --tensor-parallel-size of 2 or more.")
    if options.enable_two_batch_overlap and options.pipeline_parallel_size > 1:
        raise LoadError(
            "--enable-two-batch-overlap and --pipeline-parallel-size do not work together: stages compute "
            "parts of a step at the same time as it is."
        )
    return options.enable_two_batch_overlap


def dist_library(options: ModelOptions, device: torch.device) -> Library | None:
    """What carries what ranks exchange that share layers, None for shared memory. Raises LoadError if the
    device does not have it, or there are too few GPUs."""
    asked, on_gpu = options.dist_backend, device.type == "cuda"
    size = options.tensor_parallel_size * options.pipeline_parallel_size
    if asked == "nccl" and not on_gpu:
        raise LoadError("--dist-backend nccl needs GPUs; on a CPU ranks have shared-memory or gloo.")
    if asked in ("shared-memory", "gloo") and on_gpu:
        raise LoadError(f"--dist-backend {asked} needs --device cpu; on GPUs ranks have nccl.")
    if on_gpu and size > 1 and size > (found := len(visible_devices())):
        raise LoadError(f"The model's {size} ranks need {size} GPUs; there are {found}.")
    if options.tensor_parallel_size == 1:
        return None
    return "nccl" if on_gpu else "gloo" if asked == "gloo" else None


def attention_ranks(options: ModelOptions) -> int:
    """See `Comm`. Raises LoadError for options that contradict each other."""
    size, asked = options.tensor_parallel_size, options.attention_ranks
    if not options.enable_dp_attention:
        if asked is not None:
            raise LoadError(f"--attention-ranks {asked} needs --enable-dp-attention.")
        return 0
    if size == 1:
        raise LoadError("--enable-dp-attention needs a --tensor-parallel-size of 2 or more.")
    if options.pipeline_parallel_size > 1:
        raise LoadError("--enable-dp-attention and --pipeline-parallel-size do not work together so far.")
    if asked is not None and asked >= size:
        raise LoadError(
            f"--attention-ranks {asked}: it must be less than --tensor-parallel-size, which is {size}, so "
            "that there are ranks for MLPs and experts."
        )
    return asked or size
