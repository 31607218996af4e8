"""Compiles the kernels that a host function would launch, ahead of time, for GPUs that this machine does not
have.

`launches` runs the host function on meta tensors and intercepts the launches, so shapes may be as large as in
production. `compiled` turns a launch into machine code and reads it.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import triton
from patience import PATIENCE
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# Bytes, by capability; a launch with more is refused.
MOST_SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


@dataclass(frozen=True)
class Launch:
    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]
    grid: tuple[int, ...] = ()

    @classmethod
    def of(cls, kernel: JITFunction, args: Sequence[Any], kwargs: dict[str, Any]) -> "Launch":
        """Make a launch from the arguments of a kernel call."""
        names = ("num_warps", "num_stages", "launch_pdl")
        options = {name: kwargs.pop(name) for name in names if name in kwargs}
        return cls(kernel, dict(kernel.signature.bind(*args, **kwargs).arguments), options)

    def specialized(self) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]:
        """What the kernel is compiled for: types, constants and alignments of the arguments."""
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            special = not parameter.do_not_specialize
            if parameter.is_constexpr or (isinstance(value, int) and value == 1 and special):
                signature[parameter.name], constants[(index,)] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = POINTERS[value.dtype]
                aligned = value.is_meta or value.data_ptr() % 16 == 0
            elif isinstance(value, float):
                signature[parameter.name], aligned = "fp32", False
            else:
                signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
                aligned = value % 16 == 0 and special
            if aligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
        return signature, constants, attributes

    def key(self, capability: int) -> str:
        """A key that is equal for launches of the same machine code."""
        return repr((self.kernel.__name__, *self.specialized(), sorted(self.options.items()), capability))


@dataclass(frozen=True)
class Machine:
    """What the compiler produced for a kernel. `instructions` counts each SASS opcode, without suffixes."""

    name: str
    registers: int
    stack: int
    shared: int
    instructions: Counter[str]
    assembly: str = field(repr=False)  # PTX
    wide_loads: int  # of 16 bytes, to registers or to shared memory
    register_products: int  # Hopper's matrix instructions whose first operand lies in registers

    @property
    def spills(self) -> int:
        return self.instructions["LDL"] + self.instructions["STL"]


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Within the block, launches are listed instead of executed."""
    found: list[Launch] = []

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(replace(Launch.of(kernel, args, kwargs), grid=tuple(grid)))

    original, JITFunction.run = JITFunction.run, run
    try:
        yield found
    finally:
        JITFunction.run = original


def compile_launch(launch: Launch, capability: int) -> tuple[Any, list[str]]:
    """Return Triton's binary, as the just-in-time compiler would make it, and its arguments' names in
    order."""
    signature, constants, attributes = launch.specialized()
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    return binary, [name for name, kind in signature.items() if kind != "constexpr"]


def compiled(launch: Launch, capability: int, folder: Path) -> Machine:
    """Compile the launch's kernel as the just-in-time compiler would for a GPU of this capability."""
    binary, _ = compile_launch(launch, capability)
    assert binary.metadata.shared <= MOST_SHARED[capability], launch.kernel.__name__
    path = folder / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage, code = (
        subprocess.run(
            [tool, option, path], capture_output=True, text=True, check=True, timeout=PATIENCE
        ).stdout
        for option in ("-res-usage", "-sass")
    )
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", code, re.MULTILINE)
    return Machine(
        name=launch.kernel.__name__,
        registers=registers,
        stack=stack,
        shared=binary.metadata.shared,
        assembly=binary.asm["ptx"],
        instructions=Counter(opcode.split(".")[0] for opcode in opcodes),
        register_products=len(re.findall(r"HGMMA\S* R\d+, R\d+, gdesc", code)),
        wide_loads=sum(opcode.startswith(("LDG", "LDGSTS")) and ".128" in opcode for opcode in opcodes),
    )
