"""Which of the compiled libraries of a wheel a processor gets."""

import platform
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from marks import long

from personae.kernels.cpu import build, compiler, prebuilt
from personae.kernels.cpu.compiler import SOURCES
from personae.kernels.cpu.prebuilt import VARIANTS, find, fitting

# What Linux says of processors with SVE.
GRAVITON_3 = (
    "fp asimd evtstrm aes crc32 atomics fphp asimdhp asimddp sve asimdfhm svei8mm svebf16 i8mm bf16 dgh rng"
)
A64FX = "fp asimd evtstrm sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm fcma dcpop sve"


def features(name: str) -> frozenset[str]:
    return next(variant.needs for variant in VARIANTS if variant.name == name)


def test_each_set_of_instructions_has_all_of_the_poorer_ones() -> None:
    x86 = [variant for variant in VARIANTS if "avx2" in variant.needs and variant.name != "avx-vnni"]
    arm = [variant for variant in VARIANTS if "asimd" in variant.needs and variant.name != "sve512"]
    for poorer, richer in (*pairwise(x86), *pairwise(arm)):
        assert poorer.needs < richer.needs


@pytest.mark.parametrize("name", [variant.name for variant in VARIANTS])
def test_a_processor_gets_the_richest_library_that_it_can_run(name: str, tmp_path: Path) -> None:
    for variant in VARIANTS:
        (tmp_path / f"{variant.name}.so").touch()
    assert find(tmp_path, features(name) | {"some_later_instruction"}) == tmp_path / f"{name}.so"


def test_a_poorer_library_is_taken_where_the_richest_is_missing(tmp_path: Path) -> None:
    (tmp_path / "x86-64-v3.so").touch()
    assert find(tmp_path, features("amx")) == tmp_path / "x86-64-v3.so"


def test_a_processor_of_before_has_none(tmp_path: Path) -> None:
    for variant in VARIANTS:
        (tmp_path / f"{variant.name}.so").touch()
    assert fitting(features("x86-64-v3") - {"avx2"}) == []
    assert find(tmp_path, features("x86-64-v3") - {"avx2"}) is None
    assert find(tmp_path, frozenset()) is None


@pytest.mark.parametrize(
    ("line", "machine", "bits", "richest"),
    [
        (f"Features\t: {GRAVITON_3}", "aarch64", 256, "sve256"),
        (f"Features\t: {GRAVITON_3}", "aarch64", 128, "neon-i8mm"),  # as the system may be set
        ("Features\t: fp asimd asimddp sve sve2 svei8mm i8mm", "aarch64", 128, "neon-i8mm"),
        ("Features\t: fp asimd asimddp sve", "aarch64", 256, "neon-dotprod"),
        (f"Features\t: {A64FX}", "aarch64", 512, "sve512"),
        (f"Features\t: {A64FX}", "aarch64", 256, "neon"),
        (f"Features\t: {A64FX}", "aarch64", 0, "neon"),  # Linux would not say
        ("Features\t: fp asimd aes crc32 atomics fphp asimddp i8mm", "aarch64", 0, "neon-i8mm"),
        ("Features\t: fp asimd aes crc32 atomics fphp asimddp", "aarch64", 0, "neon-dotprod"),
        ("Features\t: fp asimd evtstrm aes crc32 cpuid", "aarch64", 0, "neon"),
        ("flags\t\t: fpu abm avx avx2 bmi1 bmi2", "x86_64", 0, None),
    ],
)
def test_what_linux_says_of_a_processor_chooses_its_set(
    line: str, machine: str, bits: int, richest: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(prebuilt, "sve_bits", lambda: bits)
    monkeypatch.setattr(Path, "read_text", lambda _, encoding: f"processor\t: 0\n{line}\n")
    names = [variant.name for variant in fitting(prebuilt.features_here())]
    assert (names[0] if names else None) == richest


@pytest.mark.parametrize(
    ("answer", "bits"),
    [(32, 256), (64 | 1 << 17, 512), (-1, 0)],  # bytes; bytes that children inherit, too; no SVE
)
def test_the_length_of_sve_is_what_linux_answers_for_this_process(
    answer: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Libc:
        def prctl(self, *what: int) -> int:
            asked.append(what[0])
            return answer

    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("ctypes.CDLL", lambda _: Libc())
    assert compiler.sve_bits() == bits
    assert asked == [51]  # PR_SVE_GET_VL


@pytest.mark.parametrize(
    ("bits", "flag"), [(256, True), (512, True), (128, False), (1024, False), (0, False)]
)
def test_a_checkout_is_compiled_for_the_length_of_sve_where_the_sources_know_it(
    bits: int, flag: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "sve_bits", lambda: bits)
    assert (f"-msve-vector-bits={bits}" in compiler._flags()) == flag


def test_a_library_for_one_arm_processor_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [
        "processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd03\n",
        "processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU part\t: 0xd0c\n",
        "processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU part\t: 0xd40\n",
    ]
    texts = iter(said)
    monkeypatch.setattr(Path, "read_text", lambda _, encoding: next(texts))
    assert len({compiler._processor() for _ in said}) == len(said)


def test_a_library_that_cannot_be_loaded_gives_way_to_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "amx.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(prebuilt, "find", lambda features: broken)
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert build.library.__wrapped__() is None
    assert "cannot be loaded" in caplog.messages[0]
    assert caplog.messages[1].startswith("There is no C++ compiler")


@pytest.mark.skipif(not shutil.which("clang++"), reason="no clang++")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.parametrize(
    "name",
    [
        variant.name if variant.name in ("x86-64-v3", "amx", "sve256") else long(variant.name)
        for variant in VARIANTS
    ],
)
def test_clang_takes_the_sources_for_every_set_without_a_warning(name: str) -> None:
    (variant,) = (variant for variant in VARIANTS if variant.name == name)
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wno-psabi", "-Wno-unknown-pragmas", "-Werror"]
    if "asimd" in variant.needs:
        if not shutil.which("aarch64-linux-gnu-g++"):
            pytest.skip("no headers of ARM's system")
        flags.append("--target=aarch64-linux-gnu")
    own = (flag for flag in variant.flags if flag.startswith("-m"))
    done = subprocess.run(["clang++", *flags, *own, *map(str, SOURCES)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[:2000]
