"""Fuzzes GGUF files: loads good files in which a few bytes of the header were changed.

    python -m personae.evals.gguf_fuzz --count 10000

Each file is read as a server does when it starts: config, tokenizer, sampling defaults, weights. It either
loads, or a sentence says what is wrong. Everything else is a failure: another exception, more than SECONDS,
more memory than the file's size justifies, or a crash of the process.
"""

import argparse
import contextlib
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from personae.engine.checkpoints import open_checkpoint
from personae.engine.loader import load_model
from personae.engine.tokens import Tokenizer
from personae.errors import LoadError

SECONDS = 20.0
MEMORY = 64 * 2**20  # additional bytes that the arithmetic may use
PER_BYTE = 40  # bytes per byte of the file: two bits become 32, and a Python string has 50 bytes of overhead
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 2, 64, 96, 4, 2, 300
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    32,
    255,
    2**16,
    2**20,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
TYPES = {"llama": Type.Q4_0, "qwen2": Type.Q8_0, "gemma3": Type.Q5_1, "phi3": Type.F16}


def write_model(path: Path, architecture: str) -> None:
    """A good file of a small random model."""
    random_ = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    if architecture == "gemma3":
        writer.add_sliding_window(32)
        _add_pieces(writer)
    else:
        _add_bytes(writer)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    for name, shape in _shapes(architecture):
        value = random_.standard_normal(shape).astype(np.float32) * 0.1
        type = TYPES[architecture] if len(shape) == 2 else Type.F32
        writer.add_tensor(name, gguf.quants.quantize(value, type), raw_dtype=type)
    if architecture == "phi3":
        for name in ("long", "short"):
            writer.add_tensor(
                f"rope_factors_{name}.weight", np.linspace(1, 2, HIDDEN // HEADS // 2, dtype=np.float32)
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_bytes(writer: gguf.GGUFWriter) -> None:
    from personae.engine.bytelevel import BYTE_OF_CHAR

    tokens = list(BYTE_OF_CHAR)
    merges = [(one, other) for one in "aeio" for other in "nrst"]
    tokens += [one + other for one, other in merges] + ["<|im_start|>", "<|im_end|>"]
    tokens += [f"[{place}]" for place in range(VOCAB - len(tokens))]
    control = {"<|im_start|>", "<|im_end|>"}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in control else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))


def _add_pieces(writer: gguf.GGUFWriter) -> None:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [
        "<unk>",
        "<bos>",
        "<eos>",
        *bytes_,
        "▁",
        *"abcdefghij",
        "ab",
        "▁a",
        "▁ab",
        "cd",
        "abcd",
        "▁abcd",
    ]
    tokens += [f"[{place}]" for place in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (VOCAB - 259)])
    writer.add_token_scores([-float(place) for place in range(VOCAB)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _shapes(architecture: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    kv = HIDDEN // HEADS * KV_HEADS
    yield "token_embd.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", (HIDDEN,)
        if architecture == "phi3":
            yield f"blk.{layer}.attn_qkv.weight", (HIDDEN + 2 * kv, HIDDEN)
            yield f"blk.{layer}.ffn_up.weight", (2 * INNER, HIDDEN)
        else:
            for name, rows in (
                ("attn_q", HIDDEN),
                ("attn_k", kv),
                ("attn_v", kv),
                ("ffn_gate", INNER),
                ("ffn_up", INNER),
            ):
                yield f"blk.{layer}.{name}.weight", (rows, HIDDEN)
        if architecture == "qwen2":
            for name, rows in (("attn_q", HIDDEN), ("attn_k", kv), ("attn_v", kv)):
                yield f"blk.{layer}.{name}.bias", (rows,)
        if architecture == "gemma3":
            for name in ("post_attention_norm", "post_ffw_norm"):
                yield f"blk.{layer}.{name}.weight", (HIDDEN,)
            for name in ("attn_q_norm", "attn_k_norm"):
                yield f"blk.{layer}.{name}.weight", (HIDDEN // HEADS,)
        yield f"blk.{layer}.attn_output.weight", (HIDDEN, HIDDEN)
        yield f"blk.{layer}.ffn_down.weight", (HIDDEN, INNER)
    yield "output_norm.weight", (HIDDEN,)
    if architecture != "gemma3":
        yield "output.weight", (VOCAB, HIDDEN)


class Mutator:
    """Changes a good file's header, mostly its numbers: a value, a length or an offset."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._good = path.read_bytes()
        self._header = int(reader.data_offset)
        fields = [field for name, field in reader.fields.items() if not name.startswith("GGUF.")]
        whole = [*fields, *(tensor.field for tensor in reader.tensors)]
        self._values = [_value(field) for field in fields if field.types[0] not in (8, 9)]
        self._numbers = [8, 16, *(place for field in whole for place in _places(field))]

    def mutate(self, rng: random.Random) -> bytes:
        """A changed file."""
        data = bytearray(self._good)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            self._change(data, rng)
        return bytes(data)

    def _change(self, data: bytearray, rng: random.Random) -> None:
        if rng.random() < 0.35:
            at = rng.choice(self._values)
            data[at : at + 4] = struct.pack("<I", (rng.choice(NUMBERS) + rng.randint(-1, 1)) % 2**32)
            return
        at = rng.choice(self._numbers) if rng.random() < 0.8 else rng.randrange(self._header)
        at = min(at, max(len(data) - 8, 0))
        match rng.randrange(8):
            case 0:
                data[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
            case 1:
                data[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) % 2**32)
            case 2:
                data[at : at + 8] = struct.pack("<Q", max(len(data) + rng.randint(-64, 64), 0))
            case 3:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 4:
                data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)]) if at < len(data) else b""
            case 5:
                del data[at : at + rng.choice((1, 4, 8, 40))]
            case 6:
                data[at:at] = data[at : at + rng.choice((1, 4, 8, 40))]
            case 7:
                del data[
                    rng.randrange(len(data)) if rng.random() < 0.3 and len(data) > 1 else len(data) - 1 :
                ]


def _value(field: gguf.ReaderField) -> int:
    """Where a field's value begins: it is the last part."""
    return int(field.offset + sum(part.nbytes for part in field.parts[:-1]))


def _places(field: gguf.ReaderField) -> Iterator[int]:
    """Where the numbers of a header entry begin: lengths, types, values; for an array only a few."""
    at = field.offset
    for part in field.parts[:12]:
        if part.dtype != np.uint8:
            yield at
        at += part.nbytes


def load(path: Path) -> str | None:
    """Reads everything that a server reads of a file. Returns what is wrong with it, if anything."""
    try:
        checkpoint = open_checkpoint(path)
        config = checkpoint.config()
        checkpoint.generation_defaults(config.vocab_size)
        Tokenizer.load(path).encode("Hello, world! 123")
        load_model(path, device=torch.device("cpu"), max_position=256)
    except LoadError as error:
        return error.message
    return None


def play(seed: int, count: int, folder: Path) -> Counter[str]:
    """How often files loaded, and how often they were rejected. Raises AssertionError on a failure."""
    rng, found = random.Random(seed), Counter[str]()
    mutators = []
    for name in TYPES:
        write_model(folder / "good.gguf", name)
        assert (why := load(folder / "good.gguf")) is None, why
        mutators.append(Mutator(folder / "good.gguf"))
    for place in range(count):
        data = rng.choice(mutators).mutate(rng)
        path = folder / f"{place}.gguf"  # a new name for each, because the last file is still in memory
        path.write_bytes(data)
        peak, begun = Peak(), time.monotonic()
        try:
            why = load(path)
        except Exception as error:
            kept = folder.parent / f"gguf-fuzz-{seed}-{place}.gguf"
            kept.write_bytes(data)
            raise AssertionError(f"mutation {place} of seed {seed}, kept as {kept}: {error!r}") from error
        took, grown = time.monotonic() - begun, peak.grown()
        assert took < SECONDS, f"mutation {place} of seed {seed} took {took:.1f} s: {why}"
        assert grown < MEMORY + PER_BYTE * len(data), f"mutation {place} of seed {seed}: {grown} bytes: {why}"
        assert why is None or (why.strip() and "Traceback" not in why)
        found["loaded" if why is None else "refused"] += 1
        path.unlink()
    return found


class Peak:
    """The peak memory of this process from now on, if the system reports it."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def grown(self) -> int:
        """How many bytes the peak has grown."""
        return _status("VmHWM") - self._before


def _status(field: str) -> int:
    try:
        lines: Any = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def main() -> None:
    """Load damaged files and print how many loaded and how many were refused."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="damaged files")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        found = play(arguments.seed, arguments.count, Path(folder))
    shown = ", ".join(f"{count} {what}" for what, count in sorted(found.items()))
    print(f"{arguments.count} files in {time.monotonic() - begun:.0f} s: {shown}")
    sys.exit(0)


if __name__ == "__main__":
    main()
