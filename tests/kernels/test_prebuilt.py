"""Which of the compiled libraries of a wheel a processor gets."""

import platform
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from personae.kernels.cpu import build, prebuilt
from personae.kernels.cpu.compiler import SOURCES
from personae.kernels.cpu.prebuilt import VARIANTS, find, fitting


def features(name: str) -> frozenset[str]:
    return next(variant.needs for variant in VARIANTS if variant.name == name)


def test_each_set_of_instructions_has_all_of_the_poorer_ones() -> None:
    x86 = [variant for variant in VARIANTS if "avx2" in variant.needs and variant.name != "avx-vnni"]
    arm = [variant for variant in VARIANTS if "asimd" in variant.needs]
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
    ("line", "machine", "richest"),
    [
        (
            "Features\t: fp asimd aes crc32 atomics fphp asimddp i8mm",
            "aarch64",
            "neon-i8mm",
        ),
        ("Features\t: fp asimd aes crc32 atomics fphp asimddp", "aarch64", "neon-dotprod"),
        ("Features\t: fp asimd evtstrm aes crc32 cpuid", "aarch64", "neon"),
        ("flags\t\t: fpu abm avx avx2 bmi1 bmi2", "x86_64", None),
    ],
)
def test_what_linux_says_of_a_processor_chooses_its_set(
    line: str, machine: str, richest: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(Path, "read_text", lambda _, encoding: f"processor\t: 0\n{line}\n")
    names = [variant.name for variant in fitting(prebuilt.features_here())]
    assert (names[0] if names else None) == richest


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
@pytest.mark.parametrize("name", [variant.name for variant in VARIANTS if "avx2" in variant.needs])
def test_clang_takes_the_sources_for_every_set_without_a_warning(name: str) -> None:
    (variant,) = (variant for variant in VARIANTS if variant.name == name)
    flags = ("-std=c++17", "-fsyntax-only", "-Wall", "-Wno-psabi", "-Wno-unknown-pragmas", "-Werror")
    own = (flag for flag in variant.flags if flag.startswith("-m"))
    done = subprocess.run(["clang++", *flags, *own, *map(str, SOURCES)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[:2000]
