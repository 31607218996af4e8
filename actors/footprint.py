"""What a model would take, before it is loaded: `personae serve --dry-run`.

Of the model only the files' headers are read; of adapters everything, and then the base's embedding, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from personae.actors.adapter_folders import adapter_folders
from personae.actors.options import EngineOptions
from personae.actors.rank_cores import shared_cores
from personae.actors.rank_options import attention_ranks, dist_library, expert_groups
from personae.actors.sizing import choose_sizes
from personae.actors.start_adapters import read_start_adapters
from personae.engine.checkpoints import open_checkpoint
from personae.engine.checkpoints.base import EMBEDDING, OUTPUT, StoredTensor
from personae.engine.layers.dense_and_experts import experts_of
from personae.engine.loader import Described, describe
from personae.engine.lora_shapes import lora_shapes, pool_rows, rank_shapes, shared_shapes
from personae.engine.models.decoder import Decoder
from personae.engine.parallel.comm import Unconnected
from personae.kernels.cgroup import free_memory
from personae.lora.base import fingerprint
from personae.lora.weight_pools import pool_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a model takes, with all ranks together. Sizes are in bytes.

    parameters: how many numbers the weights have. file_bytes: the tensors in the files. format: that of most
    weights in memory. read_bytes: what a decode step of one row reads of the weights, which is less than
    `weight_bytes` with experts. token_bytes: the keys, values and states of a token. kv_tokens: how many
    tokens the cache holds. max_model_len: the longest sequence, in tokens. adapter_bytes: of the pool of
    adapters, with room for `adapter_ranks` ranks in every module. adapters: how many were read. free_bytes:
    what is free on the device now, None if that is unknown. warning: what would make it slow; None if
    nothing is known.
    """

    model: str
    architecture: str
    device: str
    ranks: int
    parameters: int
    file_bytes: int
    format: str
    weight_bytes: int
    read_bytes: int
    kv_dtype: str
    token_bytes: int
    kv_bytes: int
    kv_tokens: int
    max_model_len: int
    max_seqs: int
    max_batch_tokens: int
    adapters: int
    adapter_ranks: int
    adapter_bytes: int
    free_bytes: int | None
    warning: str | None

    @property
    def needed_bytes(self) -> int:
        """Weights, cache and adapters."""
        return self.weight_bytes + self.kv_bytes + self.adapter_bytes

    @property
    def fits(self) -> bool:
        """Whether the memory that is free now holds it all."""
        return self.free_bytes is None or self.needed_bytes <= self.free_bytes


def footprint(options: EngineOptions, device: torch.device) -> Footprint:
    """What the model of the options would take on the device.

    Raises ModelLoadError, AdapterError or LoadError for what `personae serve` would refuse, except too little
    memory for the weights.
    """
    checkpoint = open_checkpoint(options.model)
    described = describe(checkpoint, device=device, dtype=options.dtype, quantize=options.quantize)
    size, stages = options.tensor_parallel_size, options.pipeline_parallel_size
    groups, attention = expert_groups(options), attention_ranks(options)
    dist_library(options, device)  # which refuses what the device does not have
    comm = Unconnected(0, size, 0, stages, groups, attention_ranks=attention)
    decoders = list(described.decoders(comm))
    _, decoder = decoders[0]
    folders = adapter_folders(options.adapters, options.named_adapters)
    _set_fingerprints(decoder, described.stored, read=bool(folders))
    shapes = lora_shapes(decoder)
    adapters = read_start_adapters(folders, shapes)
    sizes = choose_sizes(
        options, decoder, shared_shapes(decoder), adapters.values(), device=device, loaded=False
    )
    layout = sizes.layout
    copies = 1 if attention else size  # of a token's page, each with a rank's part of its heads
    stored = {
        name: described.stored[name] for _, each in decoders for name in _used(described, each)
    }.values()
    return Footprint(
        model=described.name,
        architecture=described.config.architecture,
        device=str(device),
        ranks=size * stages,
        parameters=sum(prod(tensor.shape) for tensor in stored),
        file_bytes=sum(tensor.bytes for tensor in stored),
        format=described.form,
        weight_bytes=described.nbytes(comm),
        read_bytes=sum(count * _read_bytes(each) for count, each in decoders),
        kv_dtype=str(sizes.kv_dtype).removeprefix("torch."),
        token_bytes=sizes.page_bytes * copies // layout.page_size,
        kv_bytes=sizes.page_bytes * copies * layout.num_pages,
        kv_tokens=layout.num_pages * layout.page_size,
        max_model_len=layout.max_model_len,
        max_seqs=layout.max_seqs,
        max_batch_tokens=layout.max_batch_tokens,
        adapters=len(adapters),
        adapter_ranks=sizes.ranks,
        adapter_bytes=sizes.pool_bytes if size * stages == 1 else _pools_bytes(decoders, sizes.ranks),
        free_bytes=free_memory() if device.type == "cpu" else _free_on_gpus(device, size * stages),
        warning=shared_cores(options),
    )


def _free_on_gpus(device: torch.device, ranks: int) -> int:
    """What is free on the GPUs of so many ranks."""
    devices = [device] if ranks == 1 else [torch.device("cuda", number) for number in range(ranks)]
    return sum(torch.cuda.mem_get_info(each)[0] for each in devices)


def _pools_bytes(decoders: Sequence[tuple[int, Decoder]], rows: int) -> int:
    """The bytes of the adapter pools of all ranks, some of which have other modules or layers than others."""
    total, fingerprints = 0, decoders[0][1].fingerprints
    for count, decoder in decoders:
        decoder.fingerprints.update(fingerprints)
        total += count * pool_bytes(rank_shapes(decoder), pool_rows(decoder, rows), decoder.dtype)
    return total


def _set_fingerprints(decoder: Decoder, stored: Mapping[str, StoredTensor], *, read: bool) -> None:
    """The fingerprints with which copies of the base's matrices in adapters are recognized; of nothing, if no
    adapter is read."""
    nothing = torch.zeros(1, 1)
    for name in (EMBEDDING, OUTPUT):
        if name in stored or name == EMBEDDING:
            decoder.fingerprints[name] = fingerprint(stored[name].read() if read else nothing)


def _used(described: Described, decoder: Decoder) -> list[str]:
    """The names of the files' tensors that the decoder has; a tied matrix once."""
    return [name for name, _ in decoder.tensors() if name in described.stored]


def _read_bytes(decoder: Decoder) -> int:
    """What a decode step of one row reads of a rank's weights: of the embedding one row, and as many experts
    as a token uses."""
    total = decoder.nbytes - (0 if decoder.config.tie else decoder.embedding.nbytes)
    if decoder.per_layer is not None:
        total -= decoder.per_layer.table.nbytes
    for layer, spec in zip(decoder.layers, decoder.config.layer_specs, strict=True):
        moe = experts_of(spec)
        if moe is not None:
            experts = sum(tensor.nbytes for name, tensor in layer.tensors() if ".experts." in name)
            total -= experts - experts * moe.routing.top_k // moe.experts
    return total
