"""`personae quantize`: a copy of a model with four bits a weight, calibrated with texts (GPTQ, by
llm-compressor).

GPTQ rounds a matrix input by input, and corrects the inputs that are left for each error, by how the texts'
inputs vary together. Source: https://arxiv.org/abs/2210.17323. A scale is for 32 inputs: most sizes are
multiples of that, and the weights stay in their bits when they are served.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from personae.engine.checkpoints.huggingface import Folder
from personae.engine.fields import read_fields
from personae.engine.tokens import Tokenizer
from personae.errors import LoadError, ModelLoadError
from personae.kernels.sizes import size_text

GROUP = 32  # inputs that share a scale
IGNORED = ("lm_head", r"re:.*\.(gate|router|shared_expert_gate)(\..*)?$")
"""The output matrix, and the routers of experts."""
WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf")


def run(model: Path, out: Path, texts: Sequence[Path], *, windows: int, width: int) -> None:
    """Quantize the model of a folder into a new folder, with at most so many windows of `width` tokens of the
    texts. Raises LoadError."""
    source = _plain(model)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise LoadError(f"{out} exists already.")
    oneshot, modifier, dataset, auto = _library()
    parts = _windows(Tokenizer.load(model), texts, width, windows)
    typer.echo(f"calibrating with {len(parts)} windows of {width} tokens", err=True)
    wide = source.config().dtype in (None, "float32")  # whose scales would not fit into the bits
    loaded = auto.from_pretrained(model, dtype="bfloat16" if wide else "auto")
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "actorder": "static",  # by importance, with groups of neighbours
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    oneshot(
        model=loaded,
        recipe=modifier(config_groups=groups, ignore=list(IGNORED)),
        dataset=dataset.from_dict({"input_ids": parts, "attention_mask": [[1] * width] * len(parts)}),
        num_calibration_samples=len(parts),
        max_seq_length=width,
        shuffle_calibration_samples=False,
    )
    loaded.save_pretrained(out, save_compressed=True)
    for file in model.iterdir():  # the tokenizer's files and others, as they are
        if file.is_file() and not file.name.endswith(WEIGHTS) and not (out / file.name).exists():
            shutil.copy(file, out / file.name)
    written = Folder(out)
    written.tensors(written.config())  # raises if it could not be served
    before, after = (size_text(_bytes(folder)) for folder in (source, written))
    typer.echo(f"{out}: {after} instead of {before}; personae serve {out}")


def _plain(model: Path) -> Folder:
    """The model's folder. Raises LoadError unless it is one with plain weights."""
    if not (model / "config.json").is_file():
        raise ModelLoadError(f"{model} is no folder with a config.json; GGUF files are not quantized anew.")
    fields = read_fields(model / "config.json")
    if "quantization_config" in fields:
        raise fields.error("quantization_config", "the model is quantized already")
    folder = Folder(model)
    folder.tensors(folder.config())
    return folder


def _library() -> tuple[Any, Any, Any, Any]:
    """llm-compressor's function and its GPTQ, a set of samples, and what loads the model."""
    try:
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import GPTQModifier
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise LoadError(
            f"personae quantize needs llm-compressor, which cannot be imported here: {error}. "
            "Install it with: pip install llmcompressor"
        ) from None
    return oneshot, GPTQModifier, Dataset, AutoModelForCausalLM


def _windows(tokenizer: Tokenizer, texts: Sequence[Path], width: int, most: int) -> list[list[int]]:
    """At most so many windows of tokens, spread evenly over the texts. Raises LoadError."""
    ids = [token for text in texts for token in tokenizer.encode("\n".join(_read(text)))]
    found = [ids[start : start + width] for start in range(0, len(ids) - width + 1, width)]
    if not found:
        raise LoadError(f"The texts have {len(ids)} tokens, fewer than a window of {width}.")
    count = min(most, len(found))
    return [found[number * len(found) // count] for number in range(count)]


def _read(file: Path) -> Iterator[str]:
    """The texts of a file: the file itself, or of .jsonl the `text` of each line, or what its `messages`
    say."""
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{file} cannot be read: {error}.") from None
    if file.suffix != ".jsonl":
        yield content
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield _text_of(line, f"{file}, line {number}")


def _text_of(line: str, where: str) -> str:
    try:
        found = json.loads(line)
        text = found.get("text")
        if text is None:
            text = "\n".join(message["content"] for message in found["messages"])
    except (ValueError, KeyError, TypeError, AttributeError):
        text = None
    if not isinstance(text, str):
        raise LoadError(f"{where}: expected an object with text, or with messages that have content.")
    return text


def _bytes(folder: Folder) -> int:
    return sum(file.stat().st_size for file in folder.path.glob("*.safetensors"))
