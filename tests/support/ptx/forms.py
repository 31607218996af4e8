"""The instructions that the interpreter computes, with all their modifiers.

A modifier changes what an instruction does: how it rounds, whether it saturates, which threads it waits for.
So an instruction with one that is not listed is refused, not computed without it.
"""

import re

from ptx.code import Line
from ptx.faults import Fault

_INTEGER = r"[su](16|32|64)"
_BITS = r"b(16|32|64)"
_ANY = rf"({_INTEGER}|{_BITS}|f16|f32|f64)"
_MEMORY = r"[busf](8|16|32|64)"
_SPACE = r"(global|shared(::cta)?)"
_CACHE = r"(\.L1::evict_(first|last|normal))?(\.L2::cache_hint)?"
_HALVES = r"(bf16\.bf16|f16\.f16)"

_FORMS = {
    "add sub": rf"(rn\.)?(f32|f64|f16|bf16|f16x2|bf16x2)|{_INTEGER}",
    "mul": rf"(rn\.)?(f32|f64|f16|bf16|f16x2|bf16x2)|(lo|hi)\.{_INTEGER}|wide\.[su](16|32)",
    "mad": rf"lo\.{_INTEGER}|wide\.[su]32",
    "fma": r"rn\.(f32|f64|bf16|f16x2|bf16x2)",
    "div": rf"(full|approx|rn)\.f32|rn\.f64|{_INTEGER}",
    "rem": _INTEGER,
    "min max": rf"(f16|bf16|f16x2|bf16x2)|((NaN|xorsign\.abs)\.)?f32|f64|{_INTEGER}",
    "and or xor not": rf"pred|{_BITS}",
    "shl": _BITS,
    "shr": rf"{_INTEGER}|{_BITS}",
    "neg abs": r"s(16|32|64)|f16|f32|f64|bf16",
    "setp": rf"(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|nan|num)\.((and|or|xor)\.)?{_ANY}",
    "selp": _ANY,
    "ex2 lg2 rsqrt": r"approx(\.ftz)?\.f32",
    "sqrt rcp": r"(rn|approx(\.ftz)?)\.f32|rn\.f64",
    "popc clz": r"b(32|64)",
    "bfe": r"[su](32|64)",
    "bfi": r"b32",
    "prmt": r"b32",
    "mov": rf"pred|{_ANY}",
    "cvta": r"(to\.)?(global|shared)\.u64",
    "cvt": "|".join(
        [
            r"rn\.(bf16x2|f16x2)\.f32",
            r"rn\.f16x2\.e4m3x2",
            r"rn\.satfinite\.e4m3x2\.f32",
            r"(rn\.)?bf16\.f16",
            r"rn\.(bf16|f16)\.f32",
            r"rn\.bf16\.[su](8|16)",
            r"rn\.f32\.f64",
            r"f32\.(bf16|f16)",
            r"f64\.(f16|f32)",
            r"rn\.(f16|f32|f64)\.[su](8|16|32|64)",
            r"(rzi|rni|rmi|rpi)\.[su](8|16|32)\.(f16|f32|f64)",
            r"[su](8|16|32|64)\.[su](8|16|32|64)",
        ]
    ),
    "ld": rf"param\.{_MEMORY}|{_SPACE}{_CACHE}(\.v[248])?\.{_MEMORY}",
    "st": rf"{_SPACE}{_CACHE}(\.v[248])?\.{_MEMORY}",
    "cp": r"async\.(c[ag]\.shared(::cta)?\.global|commit_group|wait_group|wait_all)",
    "bar": r"(warp\.)?sync",
    "barrier": r"sync(\.aligned)?",
    "fence": r"proxy\.async(\.shared::cta)?",
    "griddepcontrol": r"wait|launch_dependents",
    "createpolicy": r"fractional\.L2::evict_(first|last)\.b64",
    "shfl": r"sync\.(bfly|idx|up|down)\.b32",
    "redux": r"sync\.((add|min|max)\.[su]32|(and|or|xor)\.b32)",
    "vote": r"sync\.ballot\.b32",
    "ldmatrix stmatrix": r"sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(::cta)?\.b16",
    "mma": rf"sync\.aligned\.m16n8k16\.row\.col\.f32\.{_HALVES}\.f32",
    "wgmma": (
        r"(fence|commit_group|wait_group)\.sync\.aligned"
        rf"|mma_async\.sync\.aligned\.m64n\d+k16\.f32\.{_HALVES}"
    ),
    "bra": r"(uni)?",
    "ret": r"",
}
_KNOWN = {name: re.compile(form) for names, form in _FORMS.items() for name in names.split()}

# Operands that say which threads take part: all of them, or the interpreter would compute something else.
_ALL = ("-1", "0xffffffff", "4294967295")
_REGISTER = re.compile(r"%(p|rs|r|f|rd|fd)\d+|[A-Za-z_]\w*")
_SPECIAL = re.compile(r"%tid\.x|%(n?ctaid)\.[xyz]|%laneid")


def check(line: Line) -> None:
    """Raises Fault if the interpreter does not compute the instruction as it is written."""
    name, rest = line.opcode[0], ".".join(line.opcode[1:])
    if name not in _KNOWN or not _KNOWN[name].fullmatch(rest) or not _whole(line):
        raise Fault(f"the interpreter does not know {line.text}")
    for operand in line.operands:
        for word in re.findall(r"%[\w.|%]*", operand):
            if not _REGISTER.fullmatch(word) and not _SPECIAL.fullmatch(word):
                raise Fault(f"the interpreter does not know {word} of {line.text}")


def _whole(line: Line) -> bool:
    """Whether all threads of the program, or of a warp, take part, and no operand is one too many."""
    if line.opcode[0] == "shfl":
        segment = "0" if line.opcode[2] == "up" else "31"
        return len(line.operands) == 5 and line.operands[3] == segment and line.operands[4] in _ALL
    if line.opcode[0] == "vote":
        return line.operands[-1] in _ALL
    if line.opcode[:2] == ("bar", "warp"):
        return line.operands[0] in _ALL
    if line.opcode[0] in ("bar", "barrier"):
        return line.operands == ("0",)
    return True
