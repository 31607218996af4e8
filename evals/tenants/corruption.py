"""Ways to corrupt an upload of an adapter. Each is a function of a random generator and a complete upload.

`SPOILERS` has them by name. The result must be rejected, unless it says `judged`: then chance decides, and an
accepted upload must be one that another reader finds complete.
"""

import json
import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors.torch import load, save

PREFIX = "base_model.model.model.layers"
ODD: list[Any] = [None, True, -1, 0, 2**63, 1e308, "", "x", [], {}, [[]], {"a": [1]}, "\u202e", [2**40] * 3]


@dataclass(frozen=True)
class Upload:
    """The parts of the form. judged: it may be valid, and is then accepted."""

    name: str
    config: bytes
    tensors: bytes
    fields: dict[str, str] = field(default_factory=dict)
    judged: bool = False


def whole(inputs: int, outputs: int, name: str = "x") -> Upload:
    """A small valid adapter: rank 2 on q of two layers."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(2):
        path = f"{PREFIX}.{layer}.self_attn.q_proj"
        tensors[f"{path}.lora_A.weight"] = torch.randn(2, inputs, generator=generator)
        tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, 2, generator=generator)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "bias": "none"}
    return Upload(name, json.dumps(config).encode(), save(tensors))


def is_whole(corrupted: Upload, original: Upload) -> bool:
    """Whether another reader finds the same structure in it as in the original, whatever the values are."""
    if corrupted.config != original.config:
        return False
    found, right = load(corrupted.tensors), load(original.tensors)
    shapes = {name: tensor.shape for name, tensor in found.items()}
    finite = all(bool(tensor.float().isfinite().all()) for tensor in found.values())
    return shapes == {name: tensor.shape for name, tensor in right.items()} and finite


def _header(upload: Upload) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", upload.tensors[:8])
    return json.loads(upload.tensors[8 : 8 + length]), upload.tensors[8 + length :]


def _file(header: object, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def truncated(rng: random.Random, upload: Upload) -> Upload:
    """One of the files ends too early."""
    if rng.random() < 0.5:
        return replace(upload, config=upload.config[: rng.randrange(len(upload.config))])
    return replace(upload, tensors=upload.tensors[: rng.randrange(len(upload.tensors))])


def lying_length(rng: random.Random, upload: Upload) -> Upload:
    """The header's length is wrong."""
    header, data = _header(upload)
    right = len(json.dumps(header).encode())
    length = rng.choice([0, 1, right - 1, right + 1, 2**63, 2**64 - 1, rng.randrange(2**64)])
    return replace(upload, tensors=_file(header, data, length))


def lying_offsets(rng: random.Random, upload: Upload) -> Upload:
    """Offsets that overlap, leave gaps, run backwards or out of the file."""
    header, data = _header(upload)
    entry = header[rng.choice(sorted(header))]
    begin, end = entry["data_offsets"]
    shift = rng.choice([-8, -1, 1, 4, 2**31, 2**63, -begin - 1])
    ways = [[begin + shift, end + shift], [begin, end + shift], [end, begin], [begin + shift, end], [begin]]
    entry["data_offsets"] = rng.choice([*ways, [float(begin), float(end)], [str(begin), str(end)]])
    return replace(upload, tensors=_file(header, data))


def odd_entry(rng: random.Random, upload: Upload) -> Upload:
    """A tensor's description is something else."""
    header, data = _header(upload)
    name, odd = rng.choice(sorted(header)), rng.choice(ODD)
    what = rng.choice(["dtype", "shape", "data_offsets", "more", "entry"])
    if what == "entry":
        header[name] = odd
    elif rng.random() < 0.3 and what != "more":
        del header[name][what]
    else:
        header[name][what] = odd
    return replace(upload, tensors=_file(header, data))


def not_finite(rng: random.Random, upload: Upload) -> Upload:
    """One value is not a number, or infinite."""
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    tensors = {name: tensor.to(dtype) for name, tensor in load(upload.tensors).items()}
    tensor = tensors[rng.choice(sorted(tensors))]
    tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice([math.nan, math.inf, -math.inf])
    return replace(upload, tensors=save(tensors))


def wrong_shape(rng: random.Random, upload: Upload) -> Upload:
    """A tensor has another shape, or an unsupported dtype."""
    tensors = load(upload.tensors)
    name = rng.choice(sorted(tensors))
    rows, columns = tensors[name].shape
    shapes = [
        (rows + 1, columns),
        (rows, columns - 1),
        (columns, rows),
        (rows * columns,),
        (rows, columns, 1),
    ]
    shapes += [(0, columns), (), (1,) * 9]
    if rng.random() < 0.2:
        tensors[name] = tensors[name].to(rng.choice([torch.int8, torch.float64, torch.bool]))
    else:
        tensors[name] = torch.zeros(rng.choice([shape for shape in shapes if shape != (rows, columns)]))
    return replace(upload, tensors=save(tensors))


def huge_rank(rng: random.Random, upload: Upload) -> Upload:
    """The config has a rank that the tensors do not have, or that no memory can hold."""
    rank = rng.choice([0, -1, 3, 2**16, 2**40, 10**30, 2.0, "2", None, [2], rng.randrange(3, 2**31)])
    config = json.loads(upload.config)
    if rng.random() < 0.5 and rank is not None:
        config["rank_pattern"] = {"q_proj": rank}
    else:
        config["r"] = 4096 if rank is None else rank
    return replace(upload, config=json.dumps(config).encode())


def other_names(rng: random.Random, upload: Upload) -> Upload:
    """A tensor has a name that does not exist in the base."""
    header, data = _header(upload)
    name = rng.choice(sorted(header))
    layer = f"{PREFIX}.{rng.choice([99, '00', '-1', '٠', '1e1'])}.self_attn.q_proj.lora_A.weight"
    names = ["", "../../etc/passwd", "a\0b", "/", "__metadata__ ", "a" * 300, name + " ", name[:-1], layer]
    names += [name.replace("q_proj", "q_pr\u043ej"), name.replace("lora_A", "lora_C"), name.upper()]
    names += ["\ud800", name.replace("self_attn", "mlp.experts.0"), name + ".default.default"]
    new = rng.choice([other for other in names if other != name])
    header[new] = header.pop(name)
    return replace(upload, tensors=_file(header, data))


def missing_half(rng: random.Random, upload: Upload) -> Upload:
    """A or B is missing."""
    tensors = load(upload.tensors)
    del tensors[rng.choice(sorted(tensors))]
    return replace(upload, tensors=save(tensors))


def odd_config(rng: random.Random, upload: Upload) -> Upload:
    """A field that would have to be ignored, or whose value is meaningless."""
    fields: list[dict[str, Any]] = [
        {"peft_type": rng.choice(["IA3", None, 1, [], "lora"])},
        {"task_type": rng.choice(["SEQ_CLS", 5, ["CAUSAL_LM"]])},
        {"fan_in_fan_out": True},
        {"layer_replication": [[0, 1]]},
        {"use_qalora": 1},
        {"use_mystery": rng.choice([1, "x", [0], {"a": 0}])},
        {"init_lora_weights": rng.choice(["pissa", "olora", ["x"], {"a": 1}, 7.5])},
        {"lora_alpha": rng.choice(["4", math.nan, math.inf, 10**400, [4], {}, None])},
        {"alpha_pattern": rng.choice([3, "x", {"q_proj": None}, {"(a+)+(": 1}, {"a" * 200: 1}])},
        {"rank_pattern": rng.choice([[1], "x", {"(?<=a)": 2}, {"q_proj": 2.5}, {"((((": 1}])},
        {"use_dora": rng.choice([True, "yes", 2, [1]])},
        {"lora_bias": rng.choice([True, "no", {"a": 1}])},
        {"bias": rng.choice(["some", 1, ["all"], {"a": 1}])},
        {"modules_to_save": rng.choice([["lm_head"], ["norm"], "lm_head", [["x"]], [{}], 3, {"a": 1}])},
        {"trainable_token_indices": rng.choice([[1], [-1], ["a"], {"norm": [1]}, {"lm_head": 3}, 7, "x"])},
        {"alora_invocation_tokens": rng.choice(["x", [-1], [1.5], ["a"], 3, {"a": 1}, [2**40], [1] * 5000])},
        {"use_dora": True, "alora_invocation_tokens": [1]},
    ]
    config = json.loads(upload.config)
    text = json.dumps({**config, **rng.choice(fields)})
    if rng.random() < 0.1:
        text = text[:-1] + ', "r": 2}'
    return replace(upload, config=text.encode())


def odd_variant(rng: random.Random, upload: Upload) -> Upload:
    """Tensors of LoRA variants that the config does not enable, or that do not fit the base."""
    tensors = load(upload.tensors)
    path = f"{PREFIX}.0.self_attn.q_proj"
    tokens, head = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
    width = tensors[f"{path}.lora_B.weight"].shape[0]
    ways = {
        f"{path}.lora_magnitude_vector": (width,),
        f"{path}.lora_B.bias": (width,),
        f"{path}.bias": (width,),
        f"{path}.base_layer.bias": (width,),
        f"{path}.base_layer.weight": (width, 2),
        f"{tokens}.weight": (3, 5),
        f"{tokens}.lora_embedding_A": (2, 7),
        f"{tokens}.token_adapter.trainable_tokens_delta": (1, 5),
        f"{head}.lora_A.weight": (2, 3),
        f"{head}.base_layer.weight": (7, 3),
        f"{head}.modules_to_save.weight": (7, 3),
        f"{head}.weight": (rng.randrange(1, 9), 3),
        f"{path}.lora_A.default.weight": (2, 2),
    }
    name = rng.choice(sorted(ways))
    tensors[name] = torch.ones(ways[name])
    return replace(upload, tensors=save(tensors))


# A pickle of version 4 that would call `builtins.print("code ran")` if it were loaded.
_PICKLE = b"\x80\x04\x8c\x08builtins\x8c\x05print\x93\x8c\x08code ran\x85R."


def other_format(rng: random.Random, upload: Upload) -> Upload:
    """A pickle, an archive, noise."""
    noise = rng.randbytes(rng.randrange(1, 400))
    heads = [
        _PICKLE,
        b"PK\x03\x04",
        b"\x1f\x8b",
        b"ustar",
        b"GGUF",
        b"",
        bytes(64),
        b"[" * 50_000,
    ]
    content = rng.choice(heads) + noise
    return replace(upload, config=content) if rng.random() < 0.3 else replace(upload, tensors=content)


def odd_name(rng: random.Random, upload: Upload) -> Upload:
    """A name with characters outside the alphabet."""
    names = ["", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", "a\0b", "-a", ".hidden", "a b", "a" * 65]
    names += ["ä", "\u0430", "a\u202eb", "a\u200b", "\uff41", "a\n", "a\r\nx: y", "%2e%2e", "🦜", "~", "con:"]
    name = rng.choice(names)
    if rng.random() < 0.5:
        place = rng.randrange(len(name) + 1)
        name = name[:place] + rng.choice("/\\ \0\n:%\u2044\u2215é") + name[place:]
    return replace(upload, name=name)


def odd_fields(rng: random.Random, upload: Upload) -> Upload:
    """Other fields of the form that are wrong, unknown, or not for the caller to set."""
    fields = [{"replace": "perhaps"}, {"shared": "2"}, {"base_model": "another"}, {"base_model": ""}]
    fields += [{"path": "/etc/passwd"}, {"x" * 300: "1"}, {"\u202e": "1"}, {"tenant": "default"}]
    return replace(upload, fields=rng.choice(fields))


def random_bytes(rng: random.Random, upload: Upload) -> Upload:
    """Bits flipped, bytes cut and inserted, anywhere in the tensors' file."""
    file = bytearray(upload.tensors)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(file))
        match rng.choice(["flip", "cut", "insert"]):
            case "flip":
                file[place] ^= 1 << rng.randrange(8)
            case "cut":
                del file[place : place + rng.randrange(1, 9)]
            case "insert":
                file[place:place] = rng.randbytes(rng.randrange(1, 9))
    return replace(upload, tensors=bytes(file), judged=True)


SPOILERS: dict[str, Callable[[random.Random, Upload], Upload]] = {
    function.__name__: function
    for function in (
        truncated,
        lying_length,
        lying_offsets,
        odd_entry,
        not_finite,
        wrong_shape,
        huge_rank,
        other_names,
        missing_half,
        odd_config,
        odd_variant,
        other_format,
        odd_name,
        odd_fields,
        random_bytes,
    )
}
