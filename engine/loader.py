"""From a model folder to a decoder that runs: safetensors, streamed tensor by tensor into their final place."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from personae.engine.config import ModelConfig, read_config, read_fields
from personae.engine.models.decoder import Decoder
from personae.errors import ModelLoadError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # safetensors' names
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")  # a buffer that old checkpoints carry; it follows from the config
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
LISTED = 40  # names in one error message

Progress = Callable[[int, int], None]


def load_model(
    folder: Path,
    *,
    device: torch.device,
    dtype: str = "auto",
    max_position: int | None = None,
    on_progress: Progress | None = None,
) -> Decoder:
    """Loads a Hugging Face model folder: `config.json` and safetensors, single or sharded.

    `dtype` is "float32", "bfloat16", "float16" or "auto", the config's own. `max_position` caps the context that
    will be run. `on_progress(done_bytes, total_bytes)` is called after each tensor, in bytes of the files. Beside
    the parameters themselves only one tensor at a time is held.

    Raises:
        ModelLoadError: names each missing, unexpected or mis-shaped tensor, or the file or field that is wrong.
    """
    config = read_config(folder)
    files = _weight_files(folder)
    stored = _stored_tensors(files)
    dtype_ = _resolve_dtype(dtype, config, stored)
    _check(config, stored)
    decoder = Decoder(config, dtype=dtype_, device=device, max_position=max_position)
    _fill(decoder, files, sum(tensor.bytes for tensor in stored.values()), on_progress)
    decoder.pack()
    return decoder
