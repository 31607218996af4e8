"""The whole engine with the bundled model: are a GPU's greedy answers those of a CPU, alone and over HTTP?

In float32 both compute the same up to rounding, so the tokens should be equal. This needs all of Personae's
dependencies, not only those that the kernels need.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.request import Request, urlopen

from personae.evals.bench.gpu.checks import Check

NEEDED = (
    *("anyio", "gguf", "greenlet", "httptools", "jsonschema_rs", "llguidance", "outlines_core"),
    *("prompt_toolkit", "python_multipart", "rpds", "starlette", "tokenizers", "uvicorn", "xgrammar"),
)
DEMO = Path(__file__).resolve().parents[2] / "demo"
SCHEMA = '{"type":"object","properties":{"n":{"type":"integer"},"s":{"enum":["a","b"]}},"required":["n","s"]}'
PROMPTS = {"one token": 1, "short": 7, "in a graph": 30, "launched": 90, "in two pages and more": 300}
TOKENS = 24  # of an answer
MEMORY = 1 << 28  # bytes for keys and values: the engine's own and the server's are on the device together
PATIENCE = 60.0  # seconds for one answer over HTTP
Answers = dict[str, list[int]]


def missing() -> list[str]:
    """The packages that this needs and that are not installed."""
    return [name for name in NEEDED if find_spec(name) is None]


def engine_answers(device: Literal["cpu", "cuda"], model: Path, adapters: Path) -> Answers:
    """Tokens by name, of sequences that run together: prompts of all lengths, each of the adapters, and
    answers bound by a schema. Step N + 1 is launched before the tokens of step N are read."""
    from personae.actors.assembly import assemble
    from personae.actors.compiler_builder import BegunCompiler
    from personae.actors.options import EngineOptions
    from personae.engine.launched import LaunchedStep
    from personae.engine.params import SamplingParams
    from personae.engine.sequence import SequenceLog
    from personae.engine.step import StepEngine, by_tenant
    from personae.engine.worker.adapters import DeviceAdapters
    from personae.grammar.spec import GrammarSpec
    from personae.lora.library import AdapterLibrary

    options = EngineOptions(
        model,
        (adapters,),
        device=device,
        dtype="float32",
        max_seqs=16,
        max_batch_tokens=512,
        max_model_len=512,
        kv_memory=MEMORY,
    )
    spec = assemble(options).engine_spec
    engine, scheduler = spec.build_step_engine(), spec.build_scheduler()
    library, compiler = spec.library, spec.build_compiler()
    assert isinstance(engine, StepEngine)
    assert isinstance(engine.worker, DeviceAdapters)
    assert isinstance(compiler, BegunCompiler)
    assert isinstance(library, AdapterLibrary)
    bound = GrammarSpec("json_schema", SCHEMA)
    grammars = {bound: compiler.compile(bound, "")}
    digests = {name: card.adapter for name, card in sorted(spec.models.items()) if card.adapter}
    for digest in digests.values():
        assert engine.worker.place(library.take(digest, library.find(digest) or library.read(digest)))
    answers: Answers = {}

    def add(name: str, count: int, adapter: str | None = None, grammar: GrammarSpec | None = None) -> None:
        tokens = tuple(5 + (7 * at + len(answers)) % (spec.vocab_size - 5) for at in range(count))
        answers[name] = []
        scheduler.add(
            SequenceLog(
                id=name,
                tokens=tokens,
                prompt_length=count,
                params=SamplingParams(max_tokens=TOKENS, seed=0, temperature=0.0),
                adapter=adapter,
                adapter_start=0,
                grammar=grammar,
            )
        )

    for name, count in PROMPTS.items():
        add(name, count)
    for name, digest in digests.items():
        add(name, 20, digest)
    add("bound", 12, grammar=bound)
    add("bound, adapted", 12, next(iter(digests.values()), None), bound)
    unread: LaunchedStep | None = None
    while True:
        plan = scheduler.plan()
        forward = None if plan is None else engine.forward(engine.prepare(plan, by_tenant(plan, grammars)))
        result = None if unread is None else engine.finish(unread)
        unread = None if plan is None or forward is None else engine.sample(plan, forward)
        if result is not None:
            for delta in scheduler.commit(result):
                answers[delta.id] += delta.tokens
        elif plan is None and not engine.deferred:
            compiler.close()
            return answers
        for id in engine.resumable():
            scheduler.resume(id)


def http_answers(device: Literal["cpu", "cuda"], model: Path, adapters: Path) -> Answers:
    """Bytes of a text by model, of a `personae serve` of its own."""
    from personae.evals.served import Served

    arguments = [str(model), "--adapters", str(adapters), "--device", device, "--dtype", "float32"]
    arguments += ["--kv-memory", str(MEMORY), "--max-model-len", "512", "--max-seqs", "16"]
    answers: Answers = {}
    with Served(arguments) as server:
        listed = _ask(f"{server.url}/v1/models", None)["data"]
        for name in sorted(entry["id"] for entry in listed):
            body = {"model": name, "prompt": "The first line:", "max_tokens": TOKENS, "temperature": 0}
            text = _ask(f"{server.url}/v1/completions", body)["choices"][0]["text"]
            answers[name] = list(text.encode())
    return answers


def _ask(url: str, body: dict[str, object] | None) -> dict[str, list[dict[str, str]]]:
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})  # noqa: S310  # our own server
    with urlopen(request, timeout=PATIENCE) as answer:  # noqa: S310  # as above
        found: dict[str, list[dict[str, str]]] = json.load(answer)
        return found


def served_checks(
    device: Literal["cpu", "cuda"] = "cuda",
    model: Path = DEMO / "model",
    adapters: Path = DEMO / "adapters",
    *,
    http: bool = True,
) -> Iterator[Check]:
    """The share of an answer from the first token on that differs; 0 is wanted."""
    if lacking := missing():
        print(f"left out, for want of {', '.join(lacking)}: the bundled model in an engine and over HTTP")
        return
    for how, answers in {"in an engine": engine_answers, "over HTTP": http_answers}.items():
        if how == "in an engine" or http:
            truth = answers("cpu", model, adapters)
            for name, found in answers(device, model, adapters).items():
                yield Check(f"the bundled model {how}, {name}", difference(found, truth[name]), 0.0)


def difference(found: list[int], truth: list[int]) -> float:
    """The share of the answer behind the last token that is equal."""
    same = next((at for at, pair in enumerate(zip(found, truth, strict=False)) if pair[0] != pair[1]), None)
    if same is None:
        return (
            0.0 if len(found) == len(truth) else 1 - min(len(found), len(truth)) / max(len(found), len(truth))
        )
    return 1 - same / max(len(found), len(truth))
