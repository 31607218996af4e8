"""A Hugging Face model folder: `config.json`, a tokenizer, and safetensors in one file or several shards."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from personae.engine.checkpoints.base import EMBEDDING, Numerics, StoredTensor, dtype_of
from personae.engine.checkpoints.fused_experts import separated
from personae.engine.checkpoints.listing import listing
from personae.engine.config import ModelConfig, read_config
from personae.engine.fields import read_fields
from personae.engine.generation_config import GenerationDefaults, read_generation_defaults
from personae.engine.quantization import scheme_of
from personae.engine.quantization.base import LinearMethod, Scheme
from personae.engine.quantization.unquantized import Unquantized
from personae.engine.tokenizer_files import TokenizerFiles, read_tokenizer_files
from personae.errors import ModelLoadError

STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' names
BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
IN_8_BITS, SCALE, INPUT_SCALE = "F8_E4M3", "_scale", "input_scale"  # weights of E4M3, and their scales
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The prefixes of the decoder's tensors in checkpoints that also have a part for images.
DECODER = re.compile(r"^(?:model\.language_model\.|language_model\.model\.)(?=embed_tokens|layers|norm)")
HEAD = re.compile(r"^language_model\.(?=lm_head)")
IMAGES = re.compile(r"^(?:model\.)?(?:vision_tower|multi_modal_projector)\.")
MTP = "model.mtp_layers."  # the prefix of layers that predict further tokens


class Folder:
    """See `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """See `Checkpoint`: the folder's name."""
        return self.path.resolve().name

    def config(self) -> ModelConfig:
        """See `Checkpoint`."""
        return read_config(self.path)

    def generation_defaults(self, vocab_size: int) -> GenerationDefaults:
        """See `Checkpoint`."""
        return read_generation_defaults(self.path, vocab_size)

    def tokenizer_files(self) -> TokenizerFiles:
        """See `Checkpoint`."""
        return read_tokenizer_files(self.path)

    def created(self) -> int:
        """See `Checkpoint`."""
        return int((self.path / "config.json").stat().st_mtime)

    def tensors(self, config: ModelConfig) -> dict[str, StoredTensor]:
        """See `Checkpoint`."""
        stored = self.stored()
        if config.mtp_layers:
            last = range(config.layers, config.layers + config.mtp_layers)
            further = (MTP, *(f"model.layers.{layer}." for layer in last))
            stored = {name: tensor for name, tensor in stored.items() if not name.startswith(further)}
        return separated(_of_decoder(stored) if config.images else stored, config)

    def stored(self) -> dict[str, StoredTensor]:
        """All tensors of the files, by their own names."""
        return _with_scales(_read_headers(_weight_files(self.path)))

    def numerics(
        self,
        config: ModelConfig,
        stored: Mapping[str, StoredTensor],
        device: torch.device,
        dtype: str,
        quantize: str | None,
    ) -> Numerics:
        """See `Checkpoint`. "auto": the config's dtype, or else the stored embedding's."""
        asked = "dtype"
        if dtype == "auto":
            asked, embedding = "config.json: dtype", stored.get(EMBEDDING)
            dtype = config.dtype or STORED.get(embedding.dtype if embedding else "", "float32")
        if quantize is None and any(tensor.dtype == IN_8_BITS for tensor in stored.values()):
            return Numerics(dtype_of(asked, dtype), _scheme_of_file(stored), "fp8")
        return Numerics(dtype_of(asked, dtype), scheme_of(quantize), quantize)


class _Reader:
    """Reads tensors from safetensors files. It keeps one file open, because tensors are read file by file."""

    def __init__(self) -> None:
        self._open: tuple[str, Any] | None = None

    def read(self, file: str, name: str) -> Tensor:
        tensor: Tensor = self._file(file).get_tensor(name)
        return tensor

    def entry(self, file: str, name: str, index: int) -> Tensor:
        tensor: Tensor = self._file(file).get_slice(name)[index]
        return tensor

    def _file(self, file: str) -> Any:
        if self._open is None or self._open[0] != file:
            self._open = file, safe_open(file, framework="pt")
        return self._open[1]


@dataclass(frozen=True, slots=True)
class _Stored(StoredTensor):
    reader: _Reader

    def read(self) -> Tensor:
        return self.reader.read(self.file, self.name)

    def entry(self, index: int) -> Tensor:
        return self.reader.entry(self.file, self.name, index)

    def blocks(self) -> Tensor:
        raise TypeError(f"{self.name} is not quantized in blocks")


@dataclass(frozen=True, slots=True)
class _Scaled(_Stored):
    """A weight of E4M3, with the file's scales: one, or one for each row."""

    scale: StoredTensor

    def read(self) -> Tensor:
        values, scales = self.scaled()
        return values.float() * scales

    def scaled(self) -> tuple[Tensor, Tensor]:
        values = self.reader.read(self.file, self.name)
        return values, self.scale.read().float().reshape(-1, 1).expand(len(values), 1)


def _with_scales(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Weights of E4M3 together with their scales, which are no tensors of their own any more; nor are scales
    of activations, which are found anew for each row."""
    found = dict(stored)
    for name, tensor in stored.items():
        scale = stored.get(name + SCALE)
        if tensor.dtype != IN_8_BITS or scale is None or not isinstance(tensor, _Stored):
            continue
        rows = tensor.shape[0]
        if scale.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)) or not scale.served:
            raise ModelLoadError(
                f"{name}: its scales are {list(scale.shape)} {scale.dtype}; weights in FP8 are served with "
                "one scale, or one for each row"
            )
        del found[name + SCALE]
        found.pop(name.removesuffix("weight") + INPUT_SCALE, None)
        own = tensor.file, tensor.shape, tensor.dtype, True, tensor.bytes, tensor.reader
        found[name] = _Scaled(tensor.name, *own, scale)
    return found


def _scheme_of_file(stored: Mapping[str, StoredTensor]) -> Scheme:
    """FP8 for the linear modules that are all in it, the others in the model's dtype."""
    from personae.engine.quantization.fp8 import Fp8

    def scheme(names: Sequence[str]) -> type[LinearMethod]:
        kept = [stored.get(f"{name}.weight") for name in names]
        return Fp8 if all(tensor and tensor.dtype == IN_8_BITS for tensor in kept) else Unquantized

    return scheme


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the folder: the single one, or those that the index names."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _shards(folder)
    pickles = [file.name for file in folder.iterdir() if file.suffix in PICKLES]
    if pickles:
        raise ModelLoadError(
            f"{listing(sorted(pickles))}: pickled weights are not read, because reading them can run code; "
            f"convert the model to safetensors (save_pretrained of transformers does)"
        )
    raise ModelLoadError(f"{folder} has neither {SINGLE} nor {INDEX}")


def _shards(folder: Path) -> list[Path]:
    """The files that the index names. All must exist and be in this folder."""
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
        raise ModelLoadError(f"{INDEX} names missing files: {listing(missing)}")
    return files


def _read_headers(files: list[Path]) -> dict[str, StoredTensor]:
    """Every tensor of the files by name, from their headers alone."""
    stored: dict[str, StoredTensor] = {}
    reader = _Reader()
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # safe_open is not a mapping
                    if name in stored:
                        first = Path(stored[name].file).name
                        raise ModelLoadError(f"{name} is both in {first} and in {file.name}")
                    part = tensors.get_slice(name)
                    shape, dtype = tuple(part.get_shape()), part.get_dtype()
                    size = prod(shape) * BYTES.get(dtype, 0)
                    stored[name] = _Stored(name, str(file), shape, dtype, dtype in STORED, size, reader)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{file.name} cannot be read as safetensors: {error}; is the download complete?"
            ) from None
    return stored


def _of_decoder(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The decoder's tensors, with the names that they have in a checkpoint without images."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if not IMAGES.match(name):
            plain = HEAD.sub("", DECODER.sub("model.", name))
            if plain in found:
                raise ModelLoadError(f"{name} and {found[plain].name} are the same tensor")
            found[plain] = tensor
    return found
