"""A Hugging Face model folder: `config.json`, a tokenizer, and safetensors in one file or several shards."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from personae.engine.checkpoints.base import EMBEDDING, Numerics, StoredTensor, dtype_of, kept_as_stored
from personae.engine.checkpoints.fused_experts import ExpertTensor, separated
from personae.engine.checkpoints.listing import listing
from personae.engine.checkpoints.module_names import with_file_names
from personae.engine.checkpoints.quantized import read_format
from personae.engine.checkpoints.quantized.base import PackedTensor
from personae.engine.checkpoints.rows import JoinedRows
from personae.engine.config import ModelConfig
from personae.engine.config_file import read_config
from personae.engine.fields import read_fields
from personae.engine.generation_config import GenerationDefaults, read_generation_defaults
from personae.engine.layers.attention import AttentionSpec
from personae.engine.quantization import scheme_of
from personae.engine.tokenizer_files import TokenizerFiles, read_tokenizer_files
from personae.errors import ModelLoadError
from personae.kernels.registry import optional
from personae.lora.shards import Shard

STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' names
BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1}
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The prefixes of the decoder's tensors in checkpoints that also have a part for images.
DECODER = re.compile(
    r"^(?:model\.language_model\.|language_model\.model\.)(?=embed_tokens|layers|norm|per_layer|altup)"
)
HEAD = re.compile(r"^language_model\.(?=lm_head)")
IMAGES = re.compile(
    r"^(?:model\.)?(?:vision_tower|vision_model|multi_modal_projector|visual|embed_vision)\."
    r"|^model\.(?:audio_tower|embed_audio)\."
)
MTP = "model.mtp_layers."  # the prefix of layers that predict further tokens
OTHER_MTP = "mtp."  # the same in other families


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
        stored = {_usual(name): tensor for name, tensor in self.stored().items()}
        if config.mtp_layers:
            last = range(config.layers, config.layers + config.mtp_layers)
            further = (MTP, OTHER_MTP, *(f"model.layers.{layer}." for layer in last))
            stored = {name: tensor for name, tensor in stored.items() if not name.startswith(further)}
        if config.images:
            stored = _of_decoder(stored)
        unused = {
            f"model.layers.{index}.self_attn.{name}.weight"
            for index, layer in enumerate(config.layer_specs)
            if isinstance(layer.attention, AttentionSpec) and layer.attention.reads is not None
            for name in ("k_proj", "v_proj", "k_norm", "v_norm")
        }
        used = {name: stored[name] for name in stored if name not in unused}
        return separated(with_file_names(used, config), config)

    def stored(self) -> dict[str, StoredTensor]:
        """All tensors of the files, by their own names."""
        compose = read_format(read_fields(self.path / "config.json"))
        return compose(_read_headers(_weight_files(self.path)))

    def numerics(
        self,
        config: ModelConfig,
        stored: Mapping[str, StoredTensor],
        device: torch.device,
        dtype: str,
        quantize: str | None,
    ) -> Numerics:
        """See `Checkpoint`. "auto": the config's dtype, or else the stored embedding's. Weights that a CPU
        multiplies in the file's bits keep these, with activations in bfloat16. FP8 stays with any dtype."""
        asked, auto = "dtype", dtype == "auto"
        if auto:
            asked, embedding = "config.json: dtype", stored.get(EMBEDDING)
            dtype = config.dtype or STORED.get(embedding.dtype if embedding else "", "float32")
        computed = dtype_of(asked, dtype)
        # A GPU multiplies experts in few bits one by one, which takes longer than all at once in more bits.
        sorts = (
            PackedTensor | JoinedRows | ExpertTensor if device.type == "cpu" else PackedTensor | JoinedRows
        )
        packed = [tensor for tensor in stored.values() if isinstance(tensor, sorts)]
        if quantize is not None or not packed:
            return Numerics(computed, scheme_of(quantize), quantize)
        kinds = {"fp8"} | _multiplied(device, computed) if auto else {"fp8"}
        there = {kind for tensor in packed if (kind := tensor.kept) in kinds and kind is not None}
        if device.type == "cpu" and there - {"fp8"}:
            computed = torch.bfloat16
        return Numerics(computed, kept_as_stored(stored, there), _named(packed, there))


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

    def part(self, file: str, name: str, shard: Shard) -> Tensor:
        whole, before = self._file(file).get_slice(name), (slice(None),) * shard.dim
        return torch.cat([whole[*before, start:stop] for start, stop in shard.ranges], shard.dim)

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

    def part(self, shard: Shard) -> Tensor:
        return self.reader.part(self.file, self.name, shard)


def _multiplied(device: torch.device, dtype: torch.dtype) -> set[str]:
    """The kinds of weights, apart from FP8 without blocks, that the device multiplies in their bits; see
    `StoredTensor.kept`."""
    there = optional("pack_linear", device, torch.bfloat16 if device.type == "cpu" else dtype) is not None
    found = {"int8", "Q8_0", "Q4_0", "MXFP4"} if there else set()
    if device.type == "cuda":
        from personae.engine.quantization.fp8_blocks import multiplied  # not read on a CPU

        found |= {"fp8_blocks"} if multiplied(device) else set()
    return found


def _named(packed: Sequence[StoredTensor], kinds: Collection[str]) -> str | None:
    """The name for the format of weights that keep these kinds; None if there are none."""
    names = Counter(tensor.dtype for tensor in packed if tensor.kept in kinds)
    return names.most_common(1)[0][0] if names else None


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


def _usual(name: str) -> str:
    """The name that most families have for a tensor. Nemotron-H has others for the decoder and the
    embedding."""
    return re.sub(r"^backbone\.", "model.", name).replace("model.embeddings.weight", EMBEDDING)


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
