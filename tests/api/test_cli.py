"""The command line, with a fake engine behind it."""

import json
import re
import signal
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path
from unittest.mock import ANY

import httpx
import pytest
from patience import PATIENCE
from programs import ROOT, Program
from typer.main import get_command
from typer.testing import CliRunner

from personae.api.cli import app
from personae.api.http.address import bind
from personae.api.mcp import allowed
from personae.api.options import GROUPS, Replicas, ServeOptions, options_of
from personae.api.wire.compat_names import _OPTIONS, _SHORT, option_here

OPTION = re.compile(r"--[a-z-]+[a-z]")
SERVE = get_command(app).commands["serve"].params
OURS = {name for param in SERVE for name in (*param.opts, *param.secondary_opts)}

PROGRAM = """
import sys, types
from contextlib import asynccontextmanager
from fake_engine import FakeEngine
from personae.api.opened import Opened
from personae.engine.generation_config import GenerationDefaults
from personae.errors import ModelLoadError

@asynccontextmanager
async def open_engine(options, on_progress, **kept):
    if options.model is not None:
        raise ModelLoadError(f"{options.model} has no config.json.")
    on_progress("weights", 1, 2)
    on_progress("weights", 2, 2)
    yield Opened(FakeEngine(hold_after=100), GenerationDefaults(), 4)
    print("engine closed", flush=True)

sys.modules["personae.api.local"] = types.SimpleNamespace(open_engine=open_engine)
from personae.api.cli import main
main()
"""


KILLED = """
from functools import partial
from pathlib import Path
from personae.actors.multi_process import open_multi_process
from personae.api import local

killed = (sys.executable, str(Path(programs) / "faulty_core.py"), "killed", ".")
local.open_multi_process = partial(open_multi_process, command=killed)
from personae.api.cli import main
main()
"""


def start(*arguments: str) -> Program:
    """The real command in a process of its own; only `open_engine` is replaced."""
    return Program("-c", PROGRAM, *arguments, paths=(ROOT / "tests" / "support",))


def test_serve_says_when_it_is_ready_and_closes_the_engine_on_sigterm() -> None:
    with start("serve", "--port", "0") as program:
        line = program.line()
        ready = re.fullmatch(r"personae ready (http://127\.0\.0\.1:\d+) model=base adapters=1\n", line)
        assert ready, line
        body = {"model": "base", "prompt": "hi"}
        answer = httpx.post(f"{ready[1]}/v1/completions", json=body, timeout=PATIENCE)
        assert answer.json()["choices"][0]["text"] == "Hello, world!"
        program.process.send_signal(signal.SIGTERM)
        assert program.end(0) == "engine closed\n"


def test_an_engine_that_is_killed_while_it_loads_is_one_sentence_and_exit_code_3() -> None:
    support = ROOT / "tests" / "support"
    program = f"import sys; programs = {str(support)!r}\n{KILLED}"
    with Program("-c", program, "serve", "demo", "--port", "0", paths=(support,)) as served:
        assert served.end(3) == ""
        said = [line for line in served.errors.splitlines() if " loading " not in line]
    assert len(said) == 1
    assert said[0].startswith(
        "error: The engine was killed while it loaded the model: probably out of memory, "
    )


@pytest.mark.parametrize("kind", ["text", "json"])
def test_what_is_not_for_a_terminal_is_lines_from_loading_to_stopped(kind: str) -> None:
    with start("serve", "--port", "0", "--log-format", kind) as program:
        ready = re.search(r"http://\S+", program.line())
        assert ready
        body = {"model": "base", "prompt": "hi", "stream": True, "max_tokens": 400, "ignore_eos": True}
        url = f"{ready[0]}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE) as response:
            pieces = response.iter_raw()  # held: the client leaves when its iterator goes
            next(pieces)
            program.process.send_signal(signal.SIGTERM)
            program.process.send_signal(signal.SIGINT)
            program.end(0)  # before the client leaves, or there is nothing to stop
        said = program.errors.splitlines()
    if kind == "json":
        said = [json.loads(line)["message"] for line in said]
    wanted = (
        "loading the default model",
        "start: libraries took",
        "tool format generic",
        "stopping: 1 answer is running",
        "stopped",
    )
    places = [next((i for i, line in enumerate(said) if text in line), None) for text in wanted]
    assert None not in places, said
    assert places == sorted(places)


def test_from_warnings_on_nothing_is_logged_of_a_server_without_problems() -> None:
    with start("serve", "--port", "0", "--log-level", "warning") as program:
        ready = re.search(r"http://\S+", program.line())
        assert ready
        body = {"model": "base", "prompt": "hi"}
        assert httpx.post(f"{ready[0]}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
        program.process.send_signal(signal.SIGTERM)
        program.end(0)
        assert program.errors == ""


def test_no_name_of_an_option_is_cut_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["serve", "--help"]).output
    serve = get_command(app).commands["serve"]
    for option in serve.params:
        if option.opts[0].startswith("-"):
            assert re.search(rf"{option.opts[0]}\b", shown), option.opts[0]
    assert max(map(len, shown.splitlines())) <= 80
    assert "64 on a CPU" in " ".join(shown.split())


def test_help_has_a_short_name_and_groups() -> None:
    for command in ([], ["serve"], ["tenants", "create"]):
        short, long = (CliRunner().invoke(app, [*command, name]) for name in ("-h", "--help"))
        assert short.exit_code == 0
        assert short.output == long.output
    shown = CliRunner().invoke(app, ["serve", "-h"]).output
    titles = [(group.__doc__ or "").rstrip(".") + ":" for group in GROUPS]
    places = [shown.index(f"\n{title}\n") for title in titles]
    assert places == sorted(places)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_given_its_completion(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = CliRunner().invoke(app, ["--show-completion", shell], prog_name="personae")
    assert result.exit_code == 0
    assert "_PERSONAE_COMPLETE" in result.output


def test_a_shell_completes_commands_and_options() -> None:
    code = "from personae.api.cli import main; main()"
    for words, found in (("personae ser", "serve"), ("personae serve --max-s", "--max-seqs")):
        asked = {
            "_PERSONAE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        started = f"import os, sys; os.environ.update({asked!r}); sys.argv[0] = 'personae'; {code}"
        with Program("-c", started) as program:
            assert program.end(0).split() == [found]


def test_without_uvloop_the_server_runs_on_asyncio() -> None:
    code = "import sys; sys.modules['uvloop'] = None; sys.path_hooks  # no such package\n"
    hidden = (
        code
        + """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "uvloop" else found(name, *more)
"""
    )
    with Program(
        "-c", hidden + PROGRAM, "serve", "--port", "0", paths=(ROOT / "tests" / "support",)
    ) as program:
        ready = re.search(r"http://\S+", program.line())
        assert ready
        body = {"model": "base", "prompt": "hi"}
        answer = httpx.post(f"{ready[0]}/v1/completions", json=body, timeout=PATIENCE)
        assert answer.json()["choices"][0]["text"] == "Hello, world!"
        program.process.send_signal(signal.SIGTERM)
        assert program.end(0) == "engine closed\n"


def test_the_address_of_a_page_of_the_hub_is_told_the_name(asked: list[tuple[object, ...]]) -> None:
    for more in ([], ["demo", "--adapters"]):
        result = CliRunner().invoke(app, ["serve", *more, "https://huggingface.co/org/name/tree/main"])
        assert result.exit_code == 2
        assert "on the Hub is named org/name." in " ".join(result.output.split())
    assert asked == []


def test_a_gguf_file_and_the_small_model_are_taken_by_the_command(
    asked: list[tuple[object, ...]], tmp_path: Path
) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    for model in (str(tmp_path / "a.gguf"), "demo"):
        assert CliRunner().invoke(app, ["serve", model]).exit_code == 0
    assert [options.model for options, *_ in asked] == [tmp_path / "a.gguf", Path("demo")]
    result = CliRunner().invoke(app, ["serve", __file__])
    assert "is not a model" in " ".join(result.output.split())


def test_a_start_up_error_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with start("serve", str(tmp_path), "--port", "0") as program:
        assert program.end(2) == ""
        err = program.errors
    assert err.strip().splitlines()[-1] == f"error: {tmp_path} has no config.json."
    assert "Traceback" not in err


def test_traces_go_to_a_url_or_the_server_does_not_start() -> None:
    with start("serve", "--port", "0", "--otlp-traces-endpoint", "localhost:4318") as program:
        program.end(2)
        delivered = " ".join(program.errors.split())
    assert "localhost:4318 is no URL: write one like http://localhost:4318/v1/traces." in delivered


@pytest.mark.parametrize("option", ["--tool-format", "--reasoning-format"])
def test_an_unknown_format_is_rejected_before_the_model_loads(option: str) -> None:
    with start("serve", "--port", "0", option, "hermess") as program:
        program.end(2)
        delivered = program.errors
    assert "format 'hermess'. The formats are " in delivered
    assert "loading" not in delivered


def test_help_loads_nothing_heavy() -> None:
    code = textwrap.dedent("""
        import sys
        from typer.testing import CliRunner
        from personae.api.cli import app
        result = CliRunner().invoke(app, ["serve", "--help"])
        assert result.exit_code == 0, result.output
        assert not {"torch", "starlette", "uvicorn", "jinja2"} & set(sys.modules)
    """)
    with Program("-c", code) as program:
        program.end(0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What the command would serve, instead of serving it."""
    calls: list[tuple[object, ...]] = []
    monkeypatch.setitem(sys.modules, "personae.api.local", None)
    fake = type(sys)("personae.api.commands.serve")
    monkeypatch.setattr(fake, "run", lambda *arguments: calls.append(arguments), raising=False)
    monkeypatch.setitem(sys.modules, "personae.api.commands.serve", fake)
    stage = type(sys)("personae.api.commands.serve_stage")
    monkeypatch.setattr(stage, "run", lambda options: calls.append((options, None)), raising=False)
    monkeypatch.setitem(sys.modules, "personae.api.commands.serve_stage", stage)
    return calls


def test_every_option_is_passed_on(
    asked: list[tuple[object, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(allowed, "find_spec", lambda name: name)  # the package mcp may be missing
    for folder in ("model", "a", "b", "r", "e"):
        Path(folder).mkdir()
    line = (
        "serve model --adapters a --adapters b --host ::1 --port 9 --ssl-certfile c.pem --ssl-keyfile k.pem "
        "--mcp-server https://tools/x --mcp-timeout 9 "
        "--device cpu --dtype float32 "
        "--max-model-len 10 --max-batch-tokens 20 --max-seqs 3 --kv-memory 2GiB "
        "--served-model-name name --served-model-name other --default-model a "
        "--seed 4 --adapter-memory 1KiB --data-dir d --adapter-root r "
        "--insecure-no-auth --no-store-responses --engine-grace 8 --drain-timeout 7 "
        "--hang-timeout 9 --max-restarts 1 "
        "--one-process --replicas 2:4 --silence-timeout 5 "
        "--ray auto --gpus-per-replica 0.5 --cpus-per-replica 2 --cluster-host 10.0.0.1 --cluster-port 77 "
        "--adapter-cache c --adapter-cache-size 1GiB "
        "--kv-events tcp://127.0.0.1:1 --kv-events-replay tcp://127.0.0.1:2 --kv-events-topic t "
        "--no-cuda-graphs --speculate auto --draft-model small --no-jump-forward --disable-any-whitespace "
        "--property-order any --no-bundled-adapters "
        "--gpu-memory-utilization 0.8 --lora-side-stream "
        "--kv-cache-dtype fp8 --quantize int8 --default-strict --tensor-parallel-size 2 "
        "--enable-dp-attention --attention-ranks 1 --enable-two-batch-overlap "
        "--expert-parallel-size 2 --enable-eplb --num-redundant-experts 4 --pipeline-parallel-size 3 "
        "--dist-backend gloo "
        "--nnodes 3 --node-rank 1 --dist-init-addr 10.0.0.1:7100 --dist-identity machines.pem "
        "--unknown-fields ignore --root-path /llm/ --trust-request-chat-template --api-key k "
        "--database-url postgresql://h/n --object-store s3://b/p/ "
        "--allowed-origin https://a.example --allowed-origin https://b.example "
        "--batch-concurrency 5 --background-tokens 6 --request-timeout 1.5 --log-format json "
        "--log-level warning --otlp-traces-endpoint http://o --tenant-metrics 3 --eval-reports e "
        "--tool-format hermes --reasoning-format none --max-tokens-overflow refuse --stream-ping-interval 2 "
        "--adapter-versions 7 --kv-disk k --kv-disk-bytes 1GiB "
        "--kv-host-bytes 4GiB --kv-transfer-backend nixl "
        "--kv-remote s3://b/p/ --kv-remote-bytes 2GiB --packed-weights-size 3GiB "
        "--session-ttl 60 --price a=1/2 --prefill-replicas 1 --kv-transfer --spare-process "
        "--adapter-source hf://acme --model c=demo --keep-alive 9 --models-memory 1GiB "
        "--fetches-per-minute 2"
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
        served_model_name=("name", "other"),
        default_model="a",
        unknown_fields="ignore",
        root_path="/llm",
        trust_request_chat_template=True,
        seed=4,
        one_process=True,
        replicas=Replicas("2:4"),
        ray="auto",
        gpus_per_replica=0.5,
        cpus_per_replica=2.0,
        cluster_host="10.0.0.1",
        cluster_port=77,
        adapter_cache=Path("c"),
        adapter_cache_size=2**30,
        kv_events="tcp://127.0.0.1:1",
        kv_events_replay="tcp://127.0.0.1:2",
        kv_events_topic="t",
        silence_timeout=5,
        max_restarts=1,
        hang_timeout=9,
        engine_grace=8,
        spare_process=True,
        drain_timeout=7,
        cuda_graphs=False,
        gpu_memory_utilization=0.8,
        lora_side_stream=True,
        speculate="auto",
        draft_model=Path("small"),
        jump_forward=False,
        disable_any_whitespace=True,
        property_order="any",
        bundled_adapters=False,
        default_strict=True,
        kv_cache_dtype="fp8",
        quantize="int8",
        tensor_parallel_size=2,
        enable_dp_attention=True,
        attention_ranks=1,
        enable_two_batch_overlap=True,
        expert_parallel_size=2,
        enable_eplb=True,
        num_redundant_experts=4,
        pipeline_parallel_size=3,
        dist_backend="gloo",
        nnodes=3,
        node_rank=1,
        dist_init_addr="10.0.0.1:7100",
        dist_identity=Path("machines.pem"),
        host="::1",
        port=9,
        data_dir=Path("d"),
        adapter_root=(Path("r"),),
        insecure_no_auth=True,
        store_responses=False,
        api_key="k",
        database_url="postgresql://h/n",
        object_store="s3://b/p",
        allowed_origin=("https://a.example", "https://b.example"),
        batch_concurrency=5,
        background_tokens=6,
        request_timeout=1.5,
        log_format="json",
        log_level="warning",
        otlp_traces_endpoint="http://o",
        tenant_metrics=3,
        eval_reports=Path("e"),
        tool_format="hermes",
        reasoning_format="none",
        max_tokens_overflow="refuse",
        stream_ping_interval=2,
        adapter_versions=7,
        kv_host_bytes=2**32,
        kv_transfer_backend="nixl",
        kv_disk=Path("k"),
        kv_disk_bytes=2**30,
        kv_remote="s3://b/p",
        kv_remote_bytes=2**31,
        packed_weights_size=3 * 2**30,
        session_ttl=60,
        prefill_replicas=1,
        kv_transfer=True,
        ssl_certfile=Path("c.pem"),
        ssl_keyfile=Path("k.pem"),
        price=("a=1/2",),
        mcp_server=("https://tools/x",),
        mcp_timeout=9,
        adapter_source=("hf://acme",),
        fetches_per_minute=2,
        models=("c=demo",),
        keep_alive=9,
        models_memory=2**30,
    )
    plain = ServeOptions()
    same = [
        each.name
        for each in options_of(ServeOptions)
        if getattr(options, each.name) == getattr(plain, each.name)
    ]
    assert same == [], "the line above leaves these at their defaults"
    assert asked == [(options, ANY)]


def test_the_defaults_are_loopback_and_nothing_chosen(asked: list[tuple[object, ...]]) -> None:
    assert CliRunner().invoke(app, ["serve"]).exit_code == 0
    assert asked == [(ServeOptions(), ANY)]
    assert (ServeOptions().host, ServeOptions().port) == ("127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--kv-memory", "lots"], "--kv-memory"),
        (["--device", "tpu"], "--device"),
        (["--dtype", "int8"], "--dtype"),
        (["--quantize", "int3"], "--quantize"),
        (["--root-path", "llm"], "write it as /llm"),
        (["--root-path", "/a//b"], "write it as /llm"),
        (["--unknown-fields", "keep"], "--unknown-fields"),
        (["--max-seqs", "0"], "--max-seqs"),
        (["--port", "70000"], "--port"),
        (["no/such/model"], "'no/such/model' does not exist"),
        (["--adapters", "no/such/adapters"], "'no/such/adapters' does not exist"),
        (["--nonsense"], "--nonsense"),
        (["--adapter-root", "no/such/root"], "'no/such/root' does not exist"),
        (["--eval-reports", __file__], "is no folder"),
        (["--data-dir", __file__], "is no folder"),
        (["--kv-disk", __file__], "is no folder"),
        (["--allowed-origin", "app.example"], "write it as https://app.example"),
        (["--allowed-origin", "https://app.example/"], "write it as https://app.example"),
        (["--max-num-seqs", "4"], "Here it is --max-seqs."),
        (["-tp", "2"], "No such option: -tp. Here it is --tensor-parallel-size."),
        (["--tp=2"], "No such option: --tp. Here it is --tensor-parallel-size."),
        (["-m", "model.gguf"], "No such option: -m. The model is the argument before the options"),
        (["-ngl", "99"], "--device cuda"),
        (["--pipeline-parallel-size", "0"], "--pipeline-parallel-size"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], named: str, asked: list[tuple[object, ...]]) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    assert named in " ".join(plain.replace("│", " ").split())
    assert asked == []


def test_every_option_of_vllm_that_the_docs_compare_is_known_or_told_what_to_do() -> None:
    page = (ROOT / "docs/guide/migrating.md").read_text(encoding="utf-8")
    left = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
    theirs = {name for cell in left for name in OPTION.findall(cell)}
    assert len(theirs) > 25
    assert {name for name in theirs - OURS if option_here(name) is None} == set()
    delivered = {name for hint in map(option_here, theirs - OURS) for name in OPTION.findall(hint or "")}
    assert "--max-seqs" in delivered
    assert delivered <= OURS


def test_no_option_of_ours_is_taken_for_anothers() -> None:
    assert [name for name in OURS if option_here(name) is not None] == []


def test_what_to_do_about_anothers_option_names_only_options_of_ours() -> None:
    hints = [hint for name in (*_OPTIONS, *_SHORT) if (hint := option_here(name)) is not None]
    assert len(hints) == len(_OPTIONS) + len(_SHORT)
    assert {name for hint in hints for name in OPTION.findall(hint)} <= OURS


def test_the_version_is_the_packages() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"personae {version('personae')}\n"


def test_the_package_runs_as_a_module() -> None:
    with Program("-m", "personae", "serve", "no/such/model") as program:
        program.end(2)
        errors = program.errors
    assert "does not exist" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["ls"], "personae list"),
        (["download", "org/name"], "personae pull"),
        (["serve", "llama3.2"], "A model on the Hub is named org/name"),
        (["serve", "--adapters", "poet"], "An adapter on the Hub is named org/name"),
    ],
)
def test_what_other_programs_understand_leads_to_the_way_here(arguments: list[str], hint: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert hint in " ".join(result.output.split())


def test_an_address_in_use_is_said_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "personae.api.commands.serve", None)  # importing it would fail
    with bind("127.0.0.1", 0) as first:
        first.listen()
        result = CliRunner().invoke(app, ["serve", "demo", "--port", str(first.getsockname()[1])])
    assert result.exit_code == 2
    assert "--port 0 takes a free port" in result.output
