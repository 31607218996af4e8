"""The command line, with a fake engine behind it."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from personae.api.cli import app
from personae.api.options import AccessOptions, ServeOptions

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys, types
from contextlib import asynccontextmanager
from fake_engine import FakeEngine
from personae.api.options import Opened
from personae.engine.config import GenerationDefaults
from personae.errors import ModelLoadError

@asynccontextmanager
async def open_engine(options, on_progress, **kept):
    if options.model is not None:
        raise ModelLoadError(f"{options.model} has no config.json.")
    on_progress(1, 2)
    on_progress(2, 2)
    yield Opened(FakeEngine(hold_after=100), GenerationDefaults(), 4)
    print("engine closed", flush=True)

sys.modules["personae.api.local"] = types.SimpleNamespace(open_engine=open_engine)
from personae.api.cli import main
main()
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    """The real command in a process of its own; only `open_engine` is replaced."""
    paths = os.pathsep.join([str(ROOT / ".pkg"), str(ROOT / "tests/support")])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_serve_says_when_it_is_ready_and_closes_the_engine_on_sigterm() -> None:
    process = start("serve", "--port", "0")
    assert process.stdout is not None
    line = process.stdout.readline()
    ready = re.fullmatch(r"personae ready (http://127\.0\.0\.1:\d+) model=base adapters=1\n", line)
    assert ready, line + process.communicate()[1]
    answer = httpx.post(f"{ready[1]}/v1/completions", json={"model": "base", "prompt": "hi"})
    assert answer.json()["choices"][0]["text"] == "Hello, world!"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert out == "engine closed\n"
    assert process.returncode == 0


@pytest.mark.parametrize("kind", ["text", "json"])
def test_what_is_not_for_a_terminal_is_lines_from_loading_to_stopped(kind: str) -> None:
    process = start("serve", "--port", "0", "--log-format", kind)
    assert process.stdout is not None
    ready = re.search(r"http://\S+", process.stdout.readline())
    assert ready
    body = {"model": "base", "prompt": "hi", "stream": True, "max_tokens": 400, "ignore_eos": True}
    with httpx.stream("POST", f"{ready[0]}/v1/completions", json=body) as response:
        next(response.iter_raw())
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    said = err.splitlines()
    if kind == "json":
        said = [json.loads(line)["message"] for line in said]
    wanted = ("loading the bundled model", "tool format none", "stopping: 1 answer is running", "stopped")
    places = [next((i for i, line in enumerate(said) if text in line), None) for text in wanted]
    assert None not in places, err
    assert places == sorted(places)


def test_no_name_of_an_option_is_cut_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["serve", "--help"]).output
    serve = get_command(app).commands["serve"]
    for option in serve.params:
        if option.opts[0].startswith("-"):
            assert re.search(rf"{option.opts[0]}\b", shown), option.opts[0]
    assert max(map(len, shown.splitlines())) <= 80
    assert "64 on a CPU" in " ".join(shown.split())


def test_a_model_of_the_hub_is_told_how_to_be_fetched(asked: list[tuple[object, ...]]) -> None:
    result = CliRunner().invoke(app, ["serve", "meta-llama/Llama-3-8B"])
    assert result.exit_code == 2
    assert "hf download meta-llama/Llama-3-8B --local-dir DIR" in " ".join(result.output.split())
    assert asked == []


def test_a_start_up_error_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    process = start("serve", str(tmp_path), "--port", "0")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert err.strip().splitlines()[-1] == f"error: {tmp_path} has no config.json."
    assert "Traceback" not in err


def test_traces_go_to_a_url_or_the_server_does_not_start() -> None:
    process = start("serve", "--port", "0", "--otlp-traces-endpoint", "localhost:4318")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "localhost:4318 is no URL: write one like http://localhost:4318/v1/traces." in " ".join(
        err.split()
    )


def test_help_loads_nothing_heavy() -> None:
    code = textwrap.dedent("""
        import sys
        from typer.testing import CliRunner
        from personae.api.cli import app
        result = CliRunner().invoke(app, ["serve", "--help"])
        assert result.exit_code == 0, result.output
        assert not {"torch", "starlette", "uvicorn", "jinja2"} & set(sys.modules)
    """)
    paths = {"PYTHONPATH": str(ROOT / ".pkg")}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **paths}, check=True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What the command would serve, instead of serving it."""
    calls: list[tuple[object, ...]] = []
    monkeypatch.setitem(sys.modules, "personae.api.local", None)
    fake = type(sys)("personae.api.serve")
    monkeypatch.setattr(fake, "run", lambda *arguments: calls.append(arguments), raising=False)
    monkeypatch.setitem(sys.modules, "personae.api.serve", fake)
    return calls


def test_every_option_is_passed_on(
    asked: list[tuple[object, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "a", "b"):
        Path(folder).mkdir()
    line = (
        "serve model --adapters a --adapters b --host ::1 --port 9 --device cpu --dtype float32 "
        "--max-model-len 10 --max-batch-tokens 20 --max-seqs 3 --kv-memory 2GiB "
        "--served-model-name name --seed 4 --adapter-memory 1KiB --data-dir d --adapter-root r "
        "--insecure-no-auth --drain-timeout 7 --hang-timeout 9 --max-restarts 1 --one-process "
        "--no-cuda-graphs --no-jump-forward --kv-cache-dtype fp8 --quantize int8 --api-key k "
        "--allowed-origin https://a.example --allowed-origin https://b.example"
    )
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.output
    options = ServeOptions(
        model=Path("model"),
        adapters=(Path("a"), Path("b")),
        device="cpu",
        dtype="float32",
        max_model_len=10,
        max_batch_tokens=20,
        max_seqs=3,
        kv_memory=2 * 2**30,
        adapter_memory=1024,
        served_model_name="name",
        seed=4,
        one_process=True,
        max_restarts=1,
        hang_timeout=9,
        drain_timeout=7,
        cuda_graphs=False,
        jump_forward=False,
        kv_cache_dtype="fp8",
        quantize="int8",
    )
    origins = ("https://a.example", "https://b.example")
    assert asked == [(options, "::1", 9, AccessOptions(Path("d"), (Path("r"),), True, "k", origins))]


def test_the_defaults_are_loopback_and_nothing_chosen(asked: list[tuple[object, ...]]) -> None:
    assert CliRunner().invoke(app, ["serve"]).exit_code == 0
    assert asked == [(ServeOptions(), "127.0.0.1", 8000, AccessOptions())]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--kv-memory", "lots"], "--kv-memory"),
        (["--device", "tpu"], "--device"),
        (["--dtype", "int8"], "--dtype"),
        (["--quantize", "int3"], "--quantize"),
        (["--max-seqs", "0"], "--max-seqs"),
        (["--port", "70000"], "--port"),
        (["no/such/model"], "'no/such/model' does not exist"),
        (["--adapters", "no/such/adapters"], "'no/such/adapters' does not exist"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], named: str, asked: list[tuple[object, ...]]) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    assert named in " ".join(plain.replace("│", " ").split())
    assert asked == []


def test_the_version_is_the_packages() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"personae {version('personae')}\n"


def test_the_package_runs_as_a_module() -> None:
    paths = {"PYTHONPATH": str(ROOT / ".pkg")}
    command = [sys.executable, "-m", "personae", "serve", "no/such/model"]
    done = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "does not exist" in done.stderr
    assert "Traceback" not in done.stderr
