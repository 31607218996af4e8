"""From a model folder to a decoder: safetensors, streamed tensor by tensor into their place."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from personae.engine.config import ModelConfig, read_config, read_fields
from personae.engine.models.decoder import Decoder
from personae.errors import ModelLoadError
from personae.kernels.container import free_memory
from personae.kernels.memory import give_back_freed
from personae.kernels.quantized import Quantization, QuantizedWeight
from personae.lora.base import fingerprint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' names
BYTES = {"F32": 4, "BF16": 2, "F16": 2}
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HARMLESS = re.compile(
    r"\.rotary_emb\.inv_freq$"
)  # a buffer that old checkpoints carry; it follows from the config
# Checkpoints that have a part for images beside the decoder: what the decoder's tensors begin with there.
DECODER = re.compile(r"^(?:model\.language_model\.|language_model\.model\.)(?=embed_tokens|layers|norm)")
HEAD = re.compile(r"^language_model\.(?=lm_head)")
IMAGES = re.compile(r"^(?:model\.)?(?:vision_tower|multi_modal_projector)\.")
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
LISTED = 40  # names in one error message

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a file's header describes it; `name` is that in the file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return prod(self.shape) * BYTES.get(self.dtype, 0)


def load_model(
    folder: Path,
    *,
    device: torch.device,
    dtype: str = "auto",
    max_position: int | None = None,
    quantize: Quantization | None = None,
    on_progress: Progress | None = None,
) -> Decoder:
    """Loads a Hugging Face model folder: `config.json` and safetensors, single or sharded.

    `dtype` is "float32", "bfloat16", "float16" or "auto", the config's own. `max_position` caps the context
    that will be run. `quantize`: the linear modules are, as they are read. `on_progress(done_bytes,
    total_bytes)` is called after each tensor, in bytes of the files. Beside the parameters themselves only
    one tensor at a time is held.

    Raises:
        ModelLoadError: names each missing, unexpected or mis-shaped tensor, or the file or field that is
        wrong; or says that the weights are larger than the memory that is free.
    """
    config = read_config(folder)
    stored = _read_headers(_weight_files(folder))
    if config.images:
        stored = _decoder_s(stored)
    kind = _resolve_dtype(dtype, config, stored)
    _check(config, stored)
    _check_memory(config, kind, device, quantize)
    decoder = Decoder(config, dtype=kind, device=device, max_position=max_position, quantize=quantize)
    _fill(decoder, stored, on_progress)
    decoder.pack()
    give_back_freed()
    return decoder


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the folder: the single one, else those that the index names."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _shards(folder)
    pickles = [file.name for file in folder.iterdir() if file.suffix in PICKLES]
    if pickles:
        raise ModelLoadError(
            f"{_listing(sorted(pickles))}: pickled weights can run code when they are read, so they are not; "
            f"convert the model to safetensors (save_pretrained of transformers does)"
        )
    raise ModelLoadError(f"{folder} holds neither {SINGLE} nor {INDEX}")


def _shards(folder: Path) -> list[Path]:
    """The files that the index names, all of them present and in this folder."""
    fields = read_fields(folder / INDEX)
    names = fields.raw("weight_map")
    if not isinstance(names, dict) or not names:
        raise fields.error("weight_map", "is not an object of tensor names and file names")
    files = [folder / name for name in sorted(set(map(str, names.values())))]
    for file in files:
        if file.parent != folder or file.suffix != ".safetensors":
            raise fields.error("weight_map", f"{file} is not a safetensors file of this folder")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelLoadError(f"{INDEX} names files that are not there: {_listing(missing)}")
    return files


def _read_headers(files: list[Path]) -> dict[str, Stored]:
    """Every tensor of the files by name, from their headers alone."""
    stored: dict[str, Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # safe_open is no mapping
                    if name in stored:
                        raise ModelLoadError(f"{name} is both in {stored[name].file.name} and in {file.name}")
                    part = tensors.get_slice(name)
                    stored[name] = Stored(file, name, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{file.name} cannot be read as safetensors: {error}; is the download complete?"
            ) from None
    return stored


def _decoder_s(stored: dict[str, Stored]) -> dict[str, Stored]:
    """The decoder's tensors, under the names that they have without a part for images."""
    found: dict[str, Stored] = {}
    for name, tensor in stored.items():
        if not IMAGES.match(name):
            plain = HEAD.sub("", DECODER.sub("model.", name))
            if plain in found:
                raise ModelLoadError(f"{name} and {found[plain].name} are the same tensor")
            found[plain] = tensor
    return found


def _resolve_dtype(dtype: str, config: ModelConfig, stored: dict[str, Stored]) -> torch.dtype:
    """The dtype to run in. "auto": the config's; where it has none, the stored embedding's."""
    asked = "dtype"
    if dtype == "auto":
        asked, embedding = "config.json: dtype", stored.get(EMBEDDING)
        dtype = config.dtype or STORED.get(embedding.dtype if embedding else "", "float32")
    if dtype not in DTYPES:
        raise ModelLoadError(f"{asked}: {dtype!r} is not served; choose one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _check(config: ModelConfig, stored: dict[str, Stored]) -> None:
    """Compares the files' tensors with what the config asks for, before any memory is taken."""
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
        "of a dtype that is not served": [
            f"{name} ({stored[name].dtype})"
            for name in allowed
            if name in stored and stored[name].dtype not in STORED
        ],
    }
    found = [f"{what}: {_listing(names)}" for what, names in problems.items() if names]
    if found:
        raise ModelLoadError(f"the weights do not match config.json; tensors {'; '.join(found)}")


def _check_memory(
    config: ModelConfig, kind: torch.dtype, device: torch.device, quantize: Quantization | None
) -> None:
    """Compares what the weights will take with what is free, before any of it is taken."""
    free = free_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    empty = Decoder(config, dtype=kind, device=torch.device("meta"), max_position=1, quantize=quantize)
    if free is None or empty.nbytes <= free:
        return
    form = quantize or str(kind).removeprefix("torch.")
    if device.type == "cpu":
        where = "in this machine or its container"
        hint = "" if quantize == "int4" else ", or load fewer (--quantize int8 or int4, --dtype bfloat16)"
    else:
        where, hint = "on the GPU", ", or choose a smaller model"
    raise ModelLoadError(
        f"The weights take {_gib(empty.nbytes)} in {form}, and {_gib(free)} of memory are free {where}; "
        f"free some{hint}."
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _fill(decoder: Decoder, stored: dict[str, Stored], on_progress: Progress | None) -> None:
    """Copies each tensor from its file to its place, converting its dtype on the way."""
    places = dict(decoder.tensors())
    if decoder.config.tie and OUTPUT in stored:
        _check_tied(stored)
    total, done = sum(stored[name].bytes for name in places), 0
    for file in sorted({stored[name].file for name in places}):
        with safe_open(file, framework="pt") as tensors:
            for name in (name for name in places if stored[name].file == file):
                place, tensor = places[name], tensors.get_tensor(stored[name].name)
                place.copy_(tensor)
                if name in (EMBEDDING, OUTPUT):
                    decoder.fingerprints[name] = fingerprint(tensor)
                if isinstance(place, QuantizedWeight):
                    if not place.scales.isfinite().all():
                        raise ModelLoadError(
                            f"{name} has values that are not finite, of which quantized weights have none"
                        )
                elif place.dtype is torch.float16 and not place.isfinite().all():
                    raise ModelLoadError(f"{name} does not fit into float16; use bfloat16 or float32")
                done += stored[name].bytes
                if on_progress is not None:
                    on_progress(done, total)


def _check_tied(stored: dict[str, Stored]) -> None:
    """An output matrix that is tied and stored all the same must be the embedding, or one would be lost."""
    with (
        safe_open(stored[EMBEDDING].file, framework="pt") as one,
        safe_open(stored[OUTPUT].file, framework="pt") as other,
    ):
        if not one.get_tensor(stored[EMBEDDING].name).equal(other.get_tensor(stored[OUTPUT].name)):
            raise ModelLoadError(
                f"{OUTPUT} differs from {EMBEDDING}, but config.json says tie_word_embeddings"
            )


def _listing(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
