"""Instructions of one thread on its registers."""

import operator
from collections.abc import Callable

import numpy as np

from ptx.code import elements
from ptx.decode import Operands, Source, Target, operation
from ptx.numbers import (
    BITS,
    TYPES,
    Array,
    from_bf16,
    from_e4m3,
    halves,
    integer,
    narrowed,
    pair,
    to_bf16,
    to_e4m3,
)
from ptx.wave import Action, Mask, Wave

Function = Callable[..., Array]


def act(function: Function, target: Target, *sources: Source) -> Action:
    """An action that computes a register from others."""
    if len(sources) == 1:
        (only,) = sources
        return lambda wave, mask: target(wave, function(only(wave)), mask)
    if len(sources) == 2:
        first, second = sources
        return lambda wave, mask: target(wave, function(first(wave), second(wave)), mask)
    return lambda wave, mask: target(wave, function(*(source(wave) for source in sources)), mask)


def _low(x: Array, y: Array) -> Array:
    """PTX's minimum of floats is the number, where the other is a NaN."""
    return np.fmin(x, y)


def _divide(x: Array, y: Array) -> Array:
    if x.dtype.kind == "f":
        return x / y
    wide_x, wide_y = np.asarray(x, np.int64), np.asarray(y, np.int64)
    quotient = np.abs(wide_x) // np.maximum(np.abs(wide_y), 1) * np.sign(wide_x) * np.sign(wide_y)
    return quotient.astype(x.dtype)


def _remainder(x: Array, y: Array) -> Array:
    return (x - _divide(x, y) * y).astype(x.dtype)


_BINARY: dict[str, Function] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "min": np.fmin,
    "max": np.fmax,
    "div": _divide,
    "rem": _remainder,
}


@operation(*_BINARY)
def _binary(o: Operands) -> Action:
    name, kind = o.parts[0], o.kind
    if name == "mul" and "wide" in o.parts:
        return act(_wide_product(kind), o.target(), o.source(1), o.source(2))
    if name == "mul" and "hi" in o.parts:
        return act(_high_product(kind), o.target(), o.source(1), o.source(2))
    if "xorsign" in o.parts:
        return act(_xorsign(_BINARY[name]), o.target(), o.source(1), o.source(2))
    if kind in ("bf16x2", "f16x2"):
        return act(_packed(_BINARY[name], kind[:-2]), o.target(), *o.sources("b32"))
    function = _BINARY[name]
    if "NaN" in o.parts:
        function = np.minimum if name == "min" else np.maximum
    return act(_of_kind(function, kind), o.target(), o.source(1), o.source(2))


def _of_kind(function: Function, kind: str) -> Function:
    """The function on numbers of that kind; NumPy lacks bfloat16, whose registers are bits."""
    if kind != "bf16":
        return function
    return lambda *registers: to_bf16(function(*(from_bf16(register) for register in registers)))


def _wide_product(kind: str) -> Function:
    wide = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{2 * TYPES[kind].itemsize}")
    return lambda x, y: np.multiply(x, y, dtype=wide, casting="unsafe")


def _high_product(kind: str) -> Function:
    dtype = TYPES[kind]
    bits = 8 * dtype.itemsize
    if bits < 64:
        wide = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{2 * dtype.itemsize}")
        return lambda x, y: (np.multiply(x, y, dtype=wide, casting="unsafe") >> wide.type(bits)).astype(dtype)
    whole = (1 << bits) - 1
    return lambda x, y: np.array(
        [int(a) * int(b) >> bits & whole for a, b in np.broadcast(x, y)], np.uint64
    ).view(dtype)


def _xorsign(function: Function) -> Function:
    """min or max of the magnitudes, with the product's sign."""

    def run(x: Array, y: Array) -> Array:
        sign = np.signbit(x) ^ np.signbit(y)
        found = function(np.abs(x), np.abs(y))
        return np.where(sign, -found, found).astype(found.dtype)

    return run


def _packed(function: Function, kind: str) -> Function:
    """Of two halves each."""

    def run(*registers: Array) -> Array:
        parts = [halves(register, kind) for register in registers]
        low, high = (narrowed(function(*side), kind) for side in zip(*parts, strict=True))
        return pair(low, high)

    return run


@operation("shl", "shr")
def _shift(o: Operands) -> Action:
    kind, bits = o.kind, 8 * TYPES[o.kind].itemsize
    dtype = TYPES[kind]
    move = np.left_shift if o.parts[0] == "shl" else np.right_shift

    def run(x: Array, distance: Array) -> Array:
        near = move(x, np.minimum(distance, bits - 1).astype(dtype))
        if kind[0] == "s":
            return near
        return np.where(distance >= bits, dtype.type(0), near)

    return act(run, o.target(), o.source(1), o.source(2, "u32"))


@operation("mad", "fma")
def _fused(o: Operands) -> Action:
    kind = o.kind
    if "wide" in o.parts:
        product = _wide_product(kind)
        third = "s64" if kind == "s32" else "u64"
        return act(
            lambda x, y, z: product(x, y) + z, o.target(), o.source(1), o.source(2), o.source(3, third)
        )
    if kind in ("bf16x2", "f16x2"):
        return act(_packed(lambda x, y, z: x * y + z, kind[:-2]), o.target(), *o.sources("b32"))
    if kind == "f32":
        return act(_fused_float, o.target(), *o.sources(kind))
    return act(_of_kind(lambda x, y, z: x * y + z, kind), o.target(), *o.sources(kind))


def _fused_float(x: Array, y: Array, z: Array) -> Array:
    """The product is exact in float64; that the sum is rounded twice shows once in 2^29."""
    return (np.multiply(x, y, dtype=np.float64) + z).astype(np.float32)


_COMPARISONS: dict[str, Function] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": lambda x, y: (x != y) & (x == x) & (y == y),
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "equ": lambda x, y: ~((x < y) | (x > y)),
    "neu": operator.ne,
    "nan": lambda x, y: (x != x) | (y != y),
    "num": lambda x, y: (x == x) & (y == y),
}


@operation("setp")
def _compare(o: Operands) -> Action:
    compare = _COMPARISONS[o.parts[1]]
    if o.parts[2] in ("and", "or", "xor"):
        joined = _BINARY[o.parts[2]]
        return act(
            lambda x, y, p: joined(compare(x, y), p),
            o.target(),
            o.source(1),
            o.source(2),
            o.source(3, "pred"),
        )
    return act(compare, o.target(), o.source(1), o.source(2))


@operation("selp")
def _select(o: Operands) -> Action:
    return act(lambda x, y, p: np.where(p, x, y), o.target(), o.source(1), o.source(2), o.source(3, "pred"))


@operation("not", "neg", "abs")
def _unary(o: Operands) -> Action:
    function = {"not": operator.invert, "neg": operator.neg, "abs": np.abs}[o.parts[0]]
    return act(_of_kind(function, o.kind), o.target(), o.source(1))


@operation("ex2", "lg2", "sqrt", "rsqrt", "rcp")
def _special(o: Operands) -> Action:
    dtype = TYPES[o.kind]
    exact: dict[str, Function] = {
        "ex2": np.exp2,
        "lg2": np.log2,
        "sqrt": np.sqrt,
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "rcp": lambda x: 1 / x,
    }
    function = exact[o.parts[0]]
    if "ftz" in o.parts:
        return act(lambda x: _flushed(function(_flushed(x)).astype(dtype)), o.target(), o.source(1))
    return act(lambda x: function(x).astype(dtype), o.target(), o.source(1))


def _flushed(x: Array) -> Array:
    """Numbers too small for a whole mantissa become zero and keep their sign."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


@operation("popc")
def _population(o: Operands) -> Action:
    return act(lambda x: np.bitwise_count(x).astype(np.uint32), o.target(), o.source(1))


@operation("clz")
def _leading_zeros(o: Operands) -> Action:
    bits = 8 * TYPES[o.kind].itemsize
    count = np.frompyfunc(lambda x: bits - int(x).bit_length(), 1, 1)
    return act(lambda x: count(x).astype(np.uint32), o.target(), o.source(1))


@operation("bfe")
def _extract(o: Operands) -> Action:
    start, length, dtype = integer(o.text(2)), integer(o.text(3)), TYPES[o.kind]
    bits = 8 * dtype.itemsize
    unsigned = BITS[dtype.itemsize].type

    def run(x: Array) -> Array:
        left = (x << unsigned(bits - start - length)).view(dtype)
        return left >> dtype.type(bits - length)

    return act(run, o.target(), o.source(1, f"u{bits}"))


@operation("bfi")
def _insert(o: Operands) -> Action:
    start, length = integer(o.text(3)), integer(o.text(4))
    field = np.uint32(((1 << length) - 1) << start)
    return act(
        lambda x, y: (y & ~field) | (x << np.uint32(start) & field),
        o.target(),
        o.source(1, "u32"),
        o.source(2, "u32"),
    )


@operation("prmt")
def _permute(o: Operands) -> Action:
    def run(x: Array, y: Array, selector: Array) -> Array:
        x, y, selector = np.broadcast_arrays(x, y, selector)
        octets = np.stack([(word >> np.uint32(8 * at)) & 0xFF for word in (x, y) for at in range(4)], 1)
        found = np.zeros(len(octets), np.uint32)
        for at in range(4):
            choice = (selector >> np.uint32(4 * at)) & 15
            octet = np.take_along_axis(octets, (choice & 7)[:, None].astype(np.int64), 1)[:, 0]
            octet = np.where(choice & 8, np.where(octet & 0x80, 0xFF, 0), octet)
            found |= octet.astype(np.uint32) << np.uint32(8 * at)
        return found

    return act(run, o.target(), *o.sources("u32"))


@operation("mov", "cvta")
def _move(o: Operands) -> Action:
    bits = 8 * TYPES[o.kind].itemsize
    if o.text(0).startswith("{"):
        return _unpack(o, bits)
    if o.text(1).startswith("{"):
        return _pack(o, bits)
    return act(lambda x: x, o.target(), o.source(1))


def _unpack(o: Operands, bits: int) -> Action:
    names = elements(o.text(0))
    part = bits // len(names)
    source, targets = o.source(1, f"u{bits}"), [o.into(name) for name in names]
    whole, small = BITS[bits // 8].type, BITS[part // 8]

    def run(wave: Wave, mask: Mask) -> None:
        value = source(wave)
        for at, target in enumerate(targets):
            target(wave, (value >> whole(part * at)).astype(small), mask)

    return run


def _pack(o: Operands, bits: int) -> Action:
    names = elements(o.text(1))
    part, whole = bits // len(names), BITS[bits // 8]
    sources = [o.value(name, f"u{part}") for name in names]

    def run(*parts: Array) -> Array:
        value = np.zeros(1, whole)
        for at, piece in enumerate(parts):
            value = value | piece.astype(whole) << whole.type(part * at)
        return value

    return act(run, o.target(), *sources)


@operation("cvt")
def _convert(o: Operands) -> Action:
    to, source = o.parts[-2], o.parts[-1]
    target = o.target()
    if to in ("bf16x2", "f16x2") and source == "f32":
        kind = to[:-2]
        return act(
            lambda high, low: pair(narrowed(low, kind), narrowed(high, kind)),
            target,
            o.source(1, "f32"),
            o.source(2, "f32"),
        )
    if to == "f16x2" and source == "e4m3x2":
        return act(_from_e4m3_pair, target, o.source(1, "e4m3x2"))
    if to == "e4m3x2" and source == "f32":
        return act(
            lambda high, low: to_e4m3(low, high),
            target,
            o.source(1, "f32"),
            o.source(2, "f32"),
        )
    return act(_conversion(to, source, o.parts), target, o.source(1, source))


def _from_e4m3_pair(bits: Array) -> Array:
    both = from_e4m3(bits).view(np.uint16)
    return pair(both[..., 0], both[..., 1])


def _saturated(x: Array, dtype: np.dtype) -> Array:
    """Whole numbers, float64, in an integer type of up to 32 bits; what is out of range becomes the nearest
    that is not, and what is no number zero."""
    limits = np.iinfo(dtype)
    return np.nan_to_num(np.clip(x, limits.min, limits.max), nan=0).astype(dtype)


_ROUNDINGS: dict[str, Function] = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def _conversion(to: str, source: str, parts: tuple[str, ...]) -> Function:
    dtype = TYPES[to]
    if to == "bf16":
        return lambda x: to_bf16(x.astype(np.float32))
    if source == "bf16":
        return lambda x: from_bf16(x).astype(dtype)
    if source[0] == "f" and to[0] in "us":
        rounding = next(_ROUNDINGS[part] for part in parts if part in _ROUNDINGS)
        return lambda x: _saturated(rounding(x.astype(np.float64)), dtype)
    return lambda x: x.astype(dtype)
