"""PTX's types as NumPy's: registers hold bits, and an instruction says what they mean."""

import numpy as np
import torch
from numpy.typing import NDArray

from ptx.faults import Fault

Array = NDArray[np.generic]
BITS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
TYPES: dict[str, np.dtype] = {
    "pred": np.dtype(np.bool_),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "bf16": np.dtype(np.uint16),
    "bf16x2": np.dtype(np.uint32),
    "f16x2": np.dtype(np.uint32),
    "e4m3x2": np.dtype(np.uint16),
    **{f"b{8 * size}": bits for size, bits in BITS.items()},
    **{f"u{8 * size}": bits for size, bits in BITS.items()},
    **{f"s{8 * size}": np.dtype(f"i{size}") for size in BITS},
}
LARGEST_E4M3 = 448.0


def immediate(text: str, kind: str) -> np.generic:
    """A constant of an instruction, as PTX writes it, in its type."""
    dtype = TYPES[kind]
    if kind == "pred":
        return np.bool_(int(text, 0) != 0)
    if text[:2].lower() in ("0f", "0d"):
        bits = int(text[2:], 16)
    elif dtype.kind == "f":
        return dtype.type(float(text))
    else:
        bits = integer(text)
    raw = BITS[dtype.itemsize].type(bits & ((1 << 8 * dtype.itemsize) - 1))
    return raw.view(dtype)


def integer(text: str) -> int:
    """An integer constant."""
    return int(text.rstrip("U"), 0)


def from_bf16(bits: Array) -> NDArray[np.float32]:
    """bfloat16, as its 16 bits, widened."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: Array) -> NDArray[np.uint16]:
    """Rounded to bfloat16, to nearest and ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def halves(pair: Array, kind: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The lower and the upper number of a 32-bit register, widened; kind: f16 or bf16."""
    low, high = pair.astype(np.uint16), (pair >> np.uint32(16)).astype(np.uint16)
    return widened(low, kind), widened(high, kind)


def widened(bits: Array, kind: str) -> NDArray[np.float32]:
    """float32 of 16-bit numbers; kind: f16 or bf16."""
    if kind == "bf16":
        return from_bf16(bits)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    raise Fault(f"matrices of {kind} are not modelled")


def narrowed(values: Array, kind: str) -> NDArray[np.uint16]:
    """The bits of float32 numbers rounded to kind: f16 or bf16."""
    if kind == "bf16":
        return to_bf16(values)
    return values.astype(np.float16).view(np.uint16)


def pair(low: NDArray[np.uint16], high: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """Two 16-bit numbers in one register."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def from_e4m3(bits: Array) -> NDArray[np.float16]:
    """Two numbers of a 16-bit register, [..., 2]."""
    octets = np.ascontiguousarray(bits, np.uint16).view(np.uint8).copy()
    wide: NDArray[np.float16] = torch.from_numpy(octets).view(torch.float8_e4m3fn).half().numpy()
    return wide.reshape(*bits.shape, 2)


def to_e4m3(low: Array, high: Array) -> NDArray[np.uint16]:
    """Two float32 numbers as a 16-bit register; those out of range become the largest."""
    both = np.clip(np.stack([low, high], -1).astype(np.float32), -LARGEST_E4M3, LARGEST_E4M3)
    octets: NDArray[np.uint8] = torch.from_numpy(both).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return octets.view(np.uint16).reshape(low.shape)
