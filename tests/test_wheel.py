"""The wheel, in an environment of its own with what it declares and nothing else: it starts and answers."""

import json
import os
import re
import socket
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest
from lock import closure
from patience import PATIENCE
from programs import ROOT, Program

from personae.kernels.cpu.compiler import find_compiler
from personae.kernels.cpu.prebuilt import VARIANTS, features_here, fitting, make

BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the tree, with nothing of an earlier build."""
    return build(tmp_path_factory.mktemp("wheel"))


def build(folder: Path, **env: str) -> Path:
    """A wheel in `folder`."""
    settings = folder / "build.cfg"
    settings.write_text(f"[build]\nbuild_base = {folder}/build\n[egg_info]\negg_base = {folder}\n")
    subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        cwd=ROOT,
        env={**os.environ, "DIST_EXTRA_CONFIG": str(settings), **env},
        check=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    (found,) = folder.glob("personae-*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, and links to the packages that it needs."""
    return install(wheel, tmp_path_factory.mktemp("installed") / "venv")


def install(wheel: Path, folder: Path) -> Path:
    """The interpreter of a new environment in `folder`."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    with ZipFile(wheel) as archive:
        archive.extractall(packages)
    for source in needed_files():
        (packages / source.name).symlink_to(source)
    return folder / "bin" / "python"


def needed_files() -> Iterator[Path]:
    """What the packages that Personae needs have at the top of site-packages."""
    for name in closure(extras=()):
        found = distribution(name)
        tops = {path.parts[0] for path in found.files or () if path.parts[0] not in ("..", "__pycache__")}
        yield from (Path(str(found.locate_file(top))) for top in sorted(tops))


def test_the_wheel_has_everything_but_what_the_served_weights_are_made_from(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    folders = {name.rpartition("/")[0] for name in names}
    assert not [name for name in names if name.startswith("personae/evals/") and name.endswith("safetensors")]
    assert {f"personae/demo/{folder}" for folder in ("model", "adapters/verse", "smollm2/tools")} <= folders
    assert {"personae/evals/suites/bfcl/sample", "personae/actors/simulation"} <= folders
    assert {"personae/kernels/cpu/kernels.cpp", "personae/py.typed"} <= set(names)
    commands = next(name for name in names if name.endswith("entry_points.txt"))
    assert b"personae = personae.__main__:main" in ZipFile(wheel).read(commands)


def test_the_installed_server_starts_and_answers(python: Path) -> None:
    with Program("-m", "personae", "serve", "demo", "--port", "0", python=python) as server:
        ask_and_stop(server)


def ask_and_stop(server: Program) -> None:
    """One question to a server that is starting."""
    ready = re.match(r"personae ready (\S+) model=personae-demo adapters=4", server.line())
    if not ready:
        server.process.kill()
        server.process.wait(PATIENCE)
    assert ready, server.errors
    body = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0, "max_tokens": 16}
    answer = httpx.post(f"{ready[1]}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert answer.json()["choices"][0]["message"]["content"].startswith("I am the Personae demo")
    for grammar, status in (('start: "yes"', 200), ('root ::= "yes"', 400)):
        answer = httpx.post(
            f"{ready[1]}/v1/chat/completions",
            json={**body, "structured_outputs": {"grammar": grammar}},
            timeout=PATIENCE,
        )
        assert answer.status_code == status, answer.text
    assert "pip install xgrammar" in answer.json()["error"]["message"]
    server.process.terminate()
    server.end(0)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """The set of instructions for which kernels are compiled, a wheel with them, and the interpreter of an
    environment with it."""
    if not fitting(features_here()):
        pytest.skip("no x86-64-v3 processor")
    if find_compiler() is None:
        pytest.skip("no C++ compiler to make the wheel with")
    folder = tmp_path_factory.mktemp("compiled")
    poorest = VARIANTS[0].name  # which other tests have compiled, too
    make(folder / "kernels", [poorest])
    made = build(folder, PERSONAE_KERNELS=str(folder / "kernels"))
    return poorest, made, install(made, folder / "venv")


def test_a_wheel_with_kernels_starts_without_a_compiler(
    compiled: tuple[str, Path, Path], tmp_path: Path
) -> None:
    poorest, made, python = compiled
    assert made.name.endswith("-py3-none-linux_x86_64.whl")
    assert f"personae/kernels/cpu/prebuilt/{poorest}.so" in ZipFile(made).namelist()
    env = {"PATH": str(tmp_path), "CXX": "", "XDG_CACHE_HOME": str(tmp_path)}
    with Program("-m", "personae", "serve", "demo", "--port", "0", python=python, env=env) as server:
        ask_and_stop(server)
        assert f"CPU kernels: compiled for {poorest}, from the package" in server.errors
        assert "compiler" not in server.errors
    assert not list(tmp_path.rglob("*.so"))


def test_the_entry_point_of_the_image_serves_is_healthy_and_stops(
    compiled: tuple[str, Path, Path], tmp_path: Path
) -> None:
    """What the Dockerfile says of the target `cpu`, with the wheel as its stage `wheel` makes it. Only
    folders and the port are others."""
    _, _, python = compiled
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL))
    made = r"kernels\.cpu\.prebuilt (\S+);.*PERSONAE_KERNELS=\1 pip wheel"
    assert re.search(made, stages["wheel"], re.DOTALL)
    for name in ("data", "cache"):
        (tmp_path / name).mkdir()
    port = str(unused())
    here = stages["cpu"].replace("8000", port)
    here = re.sub(r"(?<=[\"=])/(data|cache)\b", lambda found: f"{tmp_path}/{found[1]}", here)
    (variables,) = re.findall(r"^ENV (.*)$", here, re.MULTILINE)
    (entry,), (health,) = (
        [json.loads(line) for line in re.findall(rf"^{kind} (\[.*)$", here, re.MULTILINE)]
        for kind in ("ENTRYPOINT", r"    CMD")
    )
    env = dict(one.split("=", 1) for one in variables.split())
    env |= {"PERSONAE_SERVER_KEY": "a-key-of-the-image", "PATH": str(tmp_path), "CXX": ""}
    assert (entry[0], health[0], "STOPSIGNAL SIGTERM" in here) == ("personae", "python", True)
    with Program("-m", *entry, "demo", python=python, env=env) as server:
        assert re.match(rf"personae ready http://\S+:{port} ", server.line()), server.errors
        subprocess.run([python, *health[1:]], check=True, timeout=PATIENCE)
        body = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0, "max_tokens": 16}
        headers = {"authorization": "Bearer a-key-of-the-image"}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=PATIENCE).raise_for_status().json()
        assert answer["choices"][0]["message"]["content"].startswith("I am the Personae demo")
        server.process.terminate()
        server.end(0)
    assert (tmp_path / "data" / "personae").is_dir()
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([python, *health[1:]], check=True, capture_output=True, timeout=PATIENCE)


def unused() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@pytest.mark.parametrize(
    "command",
    [
        "bench --model demo --requests 2 --prompt 8 --output 4",
        "eval run demo --serve --model demo --task triage --mode constrained --count 1",
        "simulate seeds --help",
    ],
    ids=lambda command: command.split()[0],
)
def test_an_installation_has_the_evals_the_benchmark_and_the_simulation(
    command: str, python: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [python, "-m", "personae", *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--help" in command or list(tmp_path.glob("runs/*/report.html"))
