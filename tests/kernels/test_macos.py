"""The CPU kernels compile and link for Apple's processors, by Zig's cross compiler (`pip install ziglang`).
They were never run there."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from personae.kernels.cpu import compiler

PYTHON_SOURCES = Path(compiler.__file__).parent.glob("*.py")
ARM64_LIBRARY = bytes.fromhex(
    "cffaedfe 0c000001 00000000 06000000"
)  # of Mach-O: 64 bits, ARM64, any of them, MH_DYLIB


@pytest.mark.skipif(find_spec("ziglang") is None, reason="ziglang is not installed: it takes 440 MB")
@pytest.mark.parametrize("flag", compiler.APPLE.values())
def test_the_kernels_compile_for_macos_and_export_all_that_python_calls(flag: str, tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    zig = (
        sys.executable,
        "-m",
        "ziglang",
        "c++",
        "-target",
        "aarch64-macos",
        flag.replace("apple-", "apple_"),
    )
    made = subprocess.run(
        [*zig, *compiler.FLAGS, "-O0", "-o", str(library), *map(str, compiler.SOURCES)],
        capture_output=True,
        text=True,
        timeout=900,  # on a busy machine
    )
    assert made.returncode == 0, made.stderr
    binary = library.read_bytes()
    assert binary.startswith(ARM64_LIBRARY)
    called = {name for source in PYTHON_SOURCES for name in re.findall(r"\bpersonae_\w+", source.read_text())}
    assert len(called) > 20
    assert [name for name in sorted(called) if b"_%b\0" % name.encode() not in binary] == []
