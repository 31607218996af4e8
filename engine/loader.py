"""Loads a model from disk into a decoder, one tensor at a time."""

import errno
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from personae.engine.checkpoints import open_checkpoint
from personae.engine.checkpoints.base import EMBEDDING, OUTPUT, Checkpoint, Numerics, StoredTensor
from personae.engine.checkpoints.listing import listing
from personae.engine.config import ModelConfig
from personae.engine.model_files import ModelFiles
from personae.engine.models.decoder import Decoder
from personae.engine.numerics import weight_files, weights_digest
from personae.engine.packed_weights import PackedWeights, code_digest, file_facts
from personae.engine.parallel.comm import ONE_RANK, Comm, Unconnected, kinds
from personae.engine.quantization.base import load
from personae.engine.quantization.unquantized import multiplies_bfloat16
from personae.errors import ModelLoadError
from personae.kernels.cgroup import free_memory, main_memory
from personae.kernels.decoder import PackedLayout, PackedPlace, Weight
from personae.kernels.malloc import give_back_freed
from personae.kernels.mappable import MappableMemory
from personae.kernels.quantized import QuantizedWeight
from personae.lora.base import CHUNK, fingerprint
from personae.lora.shapes import Fingerprint

# A buffer in old checkpoints, which follows from the config.
HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")

ALIGNMENT = 64  # bytes

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Described:
    """A model as its files' headers describe it. `stored`: its tensors by the names of `Decoder.tensors`."""

    name: str
    config: ModelConfig
    stored: Mapping[str, StoredTensor]
    numerics: Numerics

    @property
    def form(self) -> str:
        """The name of the format that most weights have in memory."""
        return self.numerics.quantization or str(self.numerics.dtype).removeprefix("torch.")

    def decoder(self, comm: Comm = ONE_RANK) -> Decoder:
        """The decoder of a rank, with shapes and without values: on torch's device "meta"."""
        return Decoder(
            self.config,
            dtype=self.numerics.dtype,
            device=torch.device("meta"),
            max_position=1,
            scheme=self.numerics.scheme,
            comm=comm,
        )

    def decoders(self, comm: Comm) -> Iterator[tuple[int, Decoder]]:
        """The decoder of a rank of each stage and of each kind, with shapes and without values, and how many
        such ranks there are. The first kind has attention."""
        for stage in range(comm.stages):
            for kind in kinds(comm.size, comm.attention_ranks):
                rank = Unconnected(
                    kind.start,
                    comm.size,
                    stage,
                    comm.stages,
                    comm.expert_groups,
                    attention_ranks=comm.attention_ranks,
                )
                yield len(kind), self.decoder(rank)

    def nbytes(self, comm: Comm) -> int:
        """The bytes of the parameters of all ranks."""
        return sum(count * decoder.nbytes for count, decoder in self.decoders(comm))


def describe(checkpoint: Checkpoint, *, device: torch.device, dtype: str, quantize: str | None) -> Described:
    """Read the headers of a model's files, and compare its tensors with its config; see `load_model`.

    Raises ModelLoadError as `load_model` does, but not for a lack of memory."""
    config = checkpoint.config()
    stored = checkpoint.tensors(config)
    numerics = checkpoint.numerics(config, stored, device, dtype, quantize)
    _check(config, stored)
    described = Described(checkpoint.name, config, stored, numerics)
    return _for_this_processor(described, device) if dtype == "auto" else described


def load_model(
    path: Path,
    *,
    device: torch.device,
    dtype: str = "auto",
    max_position: int | None = None,
    quantize: str | None = None,
    on_progress: Progress | None = None,
    comm: Comm = ONE_RANK,
    packed: PackedWeights | None = None,
    checkpoint: Checkpoint | None = None,
) -> Decoder:
    """Loads a Hugging Face model folder, or a GGUF file.

    `dtype` is "float32", "bfloat16", "float16", or "auto" for the model's own. A CPU then loads
    bfloat16 for float16, and one without instructions for bfloat16 loads float32, where half of the memory
    has room for it. `max_position` limits the
    context. `quantize`: the format in which linear modules are kept as they are read.
    `comm`: the ranks that share the model; only this rank's part is loaded, and of plain safetensors only
    that is read. `on_progress(done_bytes, total_bytes)` is called after each tensor, in bytes of the files.
    Besides the parameters only one tensor at a time is in memory. `packed`: weights that were packed before
    are taken from there, others are kept there, if the device's backend packs whole decoders. `checkpoint`:
    what is at `path`, if it is open already.

    Raises:
        ModelLoadError: names each missing, unexpected or mis-shaped tensor, or the file or field that is
        wrong; or says that the weights need more memory than is free.
        LoadError: so many ranks cannot share the model.
    """
    described = describe(checkpoint or open_checkpoint(path), device=device, dtype=dtype, quantize=quantize)
    size = described.nbytes(comm)
    own = size if device.type == "cpu" else described.decoder(comm).nbytes  # a rank has a GPU to itself
    _check_memory(described, own, device, quantize)
    config, stored, numerics = described.config, described.stored, described.numerics
    decoder = Decoder(
        config,
        dtype=numerics.dtype,
        device=device,
        max_position=max_position,
        scheme=numerics.scheme,
        comm=comm,
    )
    decoder.weight_bytes = size
    decoder.quantization = numerics.quantization
    fill = partial(_fill, decoder, stored, on_progress)
    if packed is None or (layout := decoder.packed_layout()) is None:
        fill()
        decoder.pack()
    else:
        asked = f"{config} {numerics.dtype} {numerics.quantization} {quantize}"
        _fill_and_pack(decoder, path, asked, layout, packed, fill)
    if comm.expert_groups.spare is not None:
        decoder.files = ModelFiles(path, stored)
    give_back_freed()
    return decoder


def _fill_and_pack(
    decoder: Decoder,
    path: Path,
    asked: str,
    layout: PackedLayout,
    packed: PackedWeights,
    fill: Callable[[], None],
) -> None:
    """Takes the weights from `packed`, or has `fill` read them, packs them in one memory, and keeps that.
    `asked`: what besides the model's files decides the weights."""
    places, size = _places(decoder, layout.bytes)
    if not packed.keeps(size):
        fill()
        decoder.pack()
        return
    arranged = [(name, start, tensor.dtype, tensor.shape) for name, tensor, start in places]
    files = file_facts(weight_files(path)), weights_digest(path)
    identity = "\n".join(map(str, (*files, asked, layout, arranged, code_digest())))
    found = packed.find(identity, size)
    if found is None:
        fill()
    memory = MappableMemory(size) if found is None else found.memory
    for name, tensor, start in places:
        place = memory.bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if found is None:
            place.copy_(tensor)
        if name == EMBEDDING:
            tensor.set_(place.untyped_storage(), place.storage_offset(), place.shape, place.stride())
        elif found is not None:
            tensor.copy_(place)
    decoder.pack(PackedPlace(memory.bytes[: layout.bytes], found is not None))
    if found is None:
        packed.keep(identity, memory, decoder.fingerprints)
    else:
        decoder.fingerprints.update(found.fingerprints)


def _places(decoder: Decoder, start: int) -> tuple[list[tuple[str, Tensor, int]], int]:
    """Where the parameters that are not packed lie behind the packed ones, which end at `start`; and the end
    of all."""
    places = []
    for name, tensor in decoder.unpacked():
        start = -(-start // ALIGNMENT) * ALIGNMENT
        places.append((name, tensor, start))
        start += tensor.nbytes
    return places, start


def _check(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Compares the files' tensors with the config, before any memory is allocated."""
    model = Decoder(config, dtype=torch.float32, device=torch.device("meta"), max_position=1)
    expected = {name: tuple(tensor.shape) for name, tensor in model.tensors()}
    allowed = expected | ({OUTPUT: expected[EMBEDDING]} if config.tie else {})
    problems = {
        "missing": [name for name in expected if name not in stored],
        "unexpected": [name for name in stored if name not in allowed and not HARMLESS.search(name)],
        "mis-shaped": [
            f"{name} (expected {list(shape)}, found {list(stored[name].shape)})"
            for name, shape in allowed.items()
            if name in stored and stored[name].shape != shape
        ],
        "of an unsupported dtype": [
            f"{name} ({stored[name].dtype})" for name in allowed if name in stored and not stored[name].served
        ],
    }
    found = [f"{what}: {listing(names)}" for what, names in problems.items() if names]
    if found:
        raise ModelLoadError(f"The weights do not match the model's config. Tensors {'; '.join(found)}")


def _for_this_processor(described: Described, device: torch.device) -> Described:
    """On a CPU bfloat16 for weights in float16, which no kernel there multiplies. Float32 for weights in
    bfloat16 that the processor cannot multiply. The memory in all decides and not what is free, so that a
    restarted engine computes the same."""
    numerics = described.numerics
    if device.type == "cpu" and numerics.dtype is torch.float16:
        numerics = replace(numerics, dtype=torch.bfloat16)
        described = replace(described, numerics=numerics)
    if numerics.dtype is not torch.bfloat16 or numerics.quantization or multiplies_bfloat16(device):
        return described
    wide = replace(described, numerics=replace(numerics, dtype=torch.float32))
    memory = main_memory()
    return wide if memory is None or wide.decoder().nbytes <= memory / 2 else described


def _check_memory(described: Described, size: int, device: torch.device, quantize: str | None) -> None:
    """Compares the memory that the weights need on the device, `size`, with the free memory, before any is
    allocated."""
    free = free_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if free is None or size <= free:
        return
    if device.type == "cpu":
        where = "in this machine or its container"
        hint = (
            ""
            if quantize == "int4"
            else ", or load smaller weights (--quantize int8 or int4, --dtype bfloat16)"
        )
    else:
        where, hint = "on the GPU", ", or choose a smaller model"
    raise ModelLoadError(
        f"The weights need {_gib(size)} in {described.form}, but {_gib(free)} of memory are free {where}. "
        f"Free some memory{hint}."
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _fingerprint(place: Weight, stored: StoredTensor) -> Fingerprint:
    """The fingerprint of a loaded tensor; of the stored tensor if loading rounded it."""
    if isinstance(place, torch.Tensor) and place.dtype is not torch.float16:
        return fingerprint(place)
    if isinstance(place, QuantizedWeight) and place.kind == stored.kept:
        return fingerprint(part.read() for part in place.split(CHUNK))
    return fingerprint(stored.read())


def _fill(decoder: Decoder, stored: Mapping[str, StoredTensor], on_progress: Progress | None) -> None:
    """Copies each tensor from its file into its parameter and converts its dtype on the way."""
    places = dict(decoder.tensors())
    if decoder.config.tie and OUTPUT in stored:
        _check_tied(stored)
    # A tied output matrix is the embedding.
    of = {name: stored.get(name, stored[EMBEDDING]) for name in places}
    shards = decoder.shards()
    total, done = sum(tensor.bytes for tensor in of.values()), 0
    for name in (EMBEDDING, OUTPUT):
        if name in stored and name not in places:
            decoder.fingerprints[name] = fingerprint(stored[name].read())
    for name in sorted(places, key=lambda name: of[name].file):
        load(name, places[name], of[name], shards.get(name))
        if name in stored and name in (EMBEDDING, OUTPUT):
            decoder.fingerprints[name] = (
                fingerprint(stored[name].read())
                if name in shards
                else _fingerprint(places[name], stored[name])
            )
        done += of[name].bytes
        if on_progress is not None:
            on_progress(done, total)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the system refused memory. On a CPU, torch has no error type for that."""
    refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    named = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return refused or named or "can't allocate memory" in str(error)


def _check_tied(stored: Mapping[str, StoredTensor]) -> None:
    """A stored output matrix that is tied must equal the embedding, because only one of them is used."""
    if not stored[EMBEDDING].read().equal(stored[OUTPUT].read()):
        raise ModelLoadError(f"{OUTPUT} differs from {EMBEDDING}, but config.json says tie_word_embeddings")
