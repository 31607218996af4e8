"""The whole path of a GPU without one: on paper (`paper_gpu`), as `actors/assembly.py` builds it for `cuda`.

Its device is late: nothing runs until the host waits for it. So these tests hold the engine to the answers of
a CPU with whatever the host had overwritten, freed or not waited for gone wrong, and to waiting once a step:
for its tokens.
"""

import os
import shutil
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available(),
    reason="needs Triton's compiler, and no GPU",
)
from dry_engine import DryEngine  # noqa: E402  # below the mark, which says what they need
from engine_harness import EngineHarness, Played  # noqa: E402
from family_models import make_family_folder  # noqa: E402
from gguf_files import Type as GgufType  # noqa: E402
from gguf_files import write_gguf  # noqa: E402
from marks import long  # noqa: E402
from paper_gpu import Late, PaperGpu  # noqa: E402
from quantized_checkpoints import DATA, NAMES  # noqa: E402
from tiny_adapters import ZOO, make_adapter_folder  # noqa: E402
from tiny_models import model_folder, write_tokenizer  # noqa: E402

from personae.actors.assembly import assemble  # noqa: E402
from personae.actors.options import EngineOptions  # noqa: E402
from personae.engine.speculation.forced import Retokenizer  # noqa: E402
from personae.engine.tokens import Tokenizer  # noqa: E402
from personae.engine.worker.profiling import largest  # noqa: E402
from personae.engine.worker.step_graphs import TRIALS  # noqa: E402
from personae.engine.worker.warm_up import rehearse_sampling  # noqa: E402
from personae.errors import LoadError  # noqa: E402
from personae.grammar.compiler import GrammarCompiler  # noqa: E402
from personae.grammar.spec import GrammarSpec  # noqa: E402
from personae.grammar.vocabulary import Vocabulary  # noqa: E402
from personae.kernels.registry import reference_only  # noqa: E402

SAMPLING = ("greatest_kernel", "weigh_kernel", "gather_kernel", "draw_kernel")  # once a step
RANKS = ("rank-1", "rank-8-attention", "rank-64", "rslora")
MORE = {
    "dora": {"use_dora": True, "rank": 8, "seed": 21},
    "bias": {"lora_bias": True, "rank": 4, "alpha": 12, "seed": 22},
    "words": {"rank": 4, "targets": ("q_proj", "embed_tokens"), "scale": 0.5, "seed": 23},
    "output": {"rank": 6, "targets": ("v_proj", "lm_head"), "scale": 0.5, "seed": 24},
}
SCHEMA = GrammarSpec(
    "json_schema", '{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}'
)
CHOICE = GrammarSpec("choice", '["yes, that is right, and so it is", "no, it is not so"]')
Answers = dict[str, Played]
SMALL = 24 << 20
SIZES = {"dtype": "float32", "max_seqs": 16, "max_batch_tokens": 256, "max_model_len": 256}


@pytest.fixture(scope="module")
def base() -> Path:
    return model_folder("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for name, options in ({name: ZOO[name] for name in RANKS} | MORE).items():
        make_adapter_folder(root / name, base, **options)
    return root


def scene(engine: EngineHarness | DryEngine, compiled: dict) -> list:
    """Everything that a step may be asked for, at once: 12 sequences of a few dozen tokens."""
    engine.grammars |= compiled
    prompt = [*range(40, 110)]
    return [
        *(
            engine.log(name, [30 + i, *range(5, 20)], name, max_tokens=9)
            for i, name in enumerate((*RANKS, *MORE))
        ),
        engine.log("long", prompt, max_tokens=8, logprobs=3, prompt_logprobs=2),
        engine.log("drawn", prompt[:40], temperature=0.9, top_p=0.8, seed=3, max_tokens=12, min_tokens=5),
        engine.log("filtered", [7], "rank-1", temperature=1.1, top_k=9, min_p=0.02, seed=4, max_tokens=12),
        engine.log(
            "punished", [9, 9, 8], repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2
        ),
        engine.log("biased", [11, 12], "rslora", logit_bias={5: 4.0, 6: -100.0}, logprobs=0),
        engine.log("bound", [13, 14], grammar=SCHEMA, max_tokens=20, temperature=0.7, seed=5),
        engine.log("bound, adapted", [15], "rank-64", grammar=SCHEMA, max_tokens=12),
        engine.log("forced", [13, 14], grammar=CHOICE, max_tokens=60, jump_forward=True),
        engine.log("forced, adapted", [15], "rank-64", grammar=CHOICE, max_tokens=60, jump_forward=True),
    ]


@pytest.fixture(scope="module")
def compiled(base: Path) -> dict:
    compiler = GrammarCompiler(vocabulary(base), sandboxed=False)
    return {spec: compiler.compile(spec) for spec in (SCHEMA, CHOICE)}


def vocabulary(base: Path) -> Vocabulary:
    return Vocabulary.from_tokenizer_json((base / "tokenizer.json").read_bytes(), 512, (2, 0))


@pytest.fixture(scope="module")
def truth(base: Path, adapters: Path, compiled: dict) -> Answers:
    with reference_only():
        retokenizer = Retokenizer(Tokenizer.load(base), vocabulary(base).tokens)
        harness = EngineHarness(base, {path.name: path for path in adapters.iterdir()}, spelling=retokenizer)
        found = harness.play(scene(harness, compiled))
        assert harness.scheduler.counters.jumped, "no text was forced"
        return found


def close(found: Played, wanted: Played) -> bool:
    """Whether log-probabilities are the same; the tokens are compared before."""
    mine, theirs = ([*one.logprobs, *one.prompt_logprobs] for one in (found, wanted))
    assert len(mine) == len(theirs)
    return all(
        a is b is None
        or (a is not None and b is not None and a.logprob == pytest.approx(b.logprob, abs=1e-4))
        for a, b in zip(mine, theirs, strict=True)
    )


def differing(found: Answers, truth: Answers) -> list[str]:
    """Whose answers differ."""
    return [
        name for name, one in found.items() if one.tokens != truth[name].tokens or not close(one, truth[name])
    ]


@pytest.mark.parametrize("late", [Late.ALL, long(Late.MAIN), long(Late.SIDE)])
def test_answers_are_those_of_a_cpu_whatever_is_late(late: Late, base, adapters, compiled, truth) -> None:
    with PaperGpu(SMALL, late=late) as gpu:
        engine = DryEngine(gpu, base, adapters, **SIZES, lora_side_stream=True)
        ready = set(gpu.machine.compiled)
        engine.place(*RANKS, *MORE)
        found = engine.play(scene(engine, compiled))
        assert differing(found, truth) == []
        assert gpu.machine.compiled == ready, "the warm-up left kernels for the first request to compile"
        assert gpu.machine.captures[:32] == [1, 2] * 16, "one stream for base rows, two with adapters"
        runner = engine.engine.worker
        assert runner.graphs is not None
        assert runner.graphs._capture is not None, "graphs were given up"
        used = {key for key, graph in runner.graphs._graphs.items() if graph.trials < TRIALS}
        assert {(bucket.row_tokens > 1, adapters) for bucket, adapters in used} >= {
            (False, True),
            (True, True),
        }
        assert runner.prefill_graphs is not None
        assert runner.prefill_graphs._capture is not None, "graphs of prompts were given up"
        runner.adapters.check_integrity()
        for name, launches in gpu.machine.launches.items():  # each way past Triton is checked on paper
            assert gpu.machine.bound[name] or name in SAMPLING, f"{launches} of {name} went through Triton"


def test_adapters_are_on_the_steps_own_stream_unless_they_are_asked_beside_it(base, adapters, truth) -> None:
    with PaperGpu(SMALL) as gpu:
        engine = DryEngine(gpu, base, adapters, **SIZES)
        assert set(gpu.machine.captures) == {1}
        engine.place(*RANKS)
        found = engine.play([log for log in scene(engine, {}) if log.id in RANKS])
        assert differing(found, truth) == []


def test_chunks_of_prompts_preemption_forks_and_eviction_change_nothing(
    base, adapters, compiled, truth
) -> None:
    with PaperGpu(SMALL) as gpu:
        tight = {
            "max_batch_tokens": 24,
            "kv_memory": 20 * 16384,
            "max_model_len": 128,
            "adapter_memory": 716_800,
        }
        engine = DryEngine(gpu, base, adapters, dtype="float32", max_seqs=5, **tight)
        assert engine.layout.num_pages == 20
        ready, copied = set(gpu.machine.compiled), []
        copy_pages = engine.engine.worker.kv.copy_pages
        engine.engine.worker.kv.copy_pages = lambda pairs: copied.extend(pairs) or copy_pages(pairs)  # type: ignore[method-assign]
        logs = {log.id: log for log in scene(engine, compiled)}
        found: Answers = {}
        for names in (("rank-64", "rslora"), ("rank-1", "dora"), ("rank-64", "rank-8-attention")):
            engine.place(*names)  # in the place of others, and again
            digests = {engine.cards[name].adapter for name in names}
            mine = [
                log for log in logs.values() if log.adapter in digests or (log.adapter is None and not found)
            ]
            found |= engine.play(mine)
            found |= engine.play([logs["drawn"]])  # whose prompt's pages are there already
            for digest in digests:
                engine.engine.worker.release(digest or "")
        assert differing(found, truth) == []
        assert engine.engine.worker.adapter_stats[2] > 0, "nobody was evicted"
        assert copied, "no page was copied"
        assert gpu.machine.compiled == ready


def test_a_step_waits_once_for_its_tokens_and_for_nothing_else(base, adapters) -> None:
    with PaperGpu(SMALL) as gpu:
        engine = DryEngine(gpu, base, adapters, **SIZES)
        engine.place(*RANKS)
        assert engine.waits["place"] == []
        placed = {engine.cards[name].adapter for name in RANKS}
        logs = [log for log in scene(engine, {}) if log.grammar is None and "prompt" not in log.id]
        plain = [log for log in logs if log.adapter is None or log.adapter in placed]
        engine.play(plain)
        assert {wait.kind for wait in engine.waits["forward"]} == {"a value is read"}  # graphs on trial
        engine.play(plain)
        engine.place(*MORE)
        for _ in range(2):  # graphs of other sizes are on trial
            engine.play(logs)
            engine.play(plain)
        before = engine.reads
        engine.waits = {what: [] for what in ("prepare", "forward", "sample", "finish")}
        engine.play(logs)
        engine.play(plain)
        assert engine.waits["prepare"] == engine.waits["forward"] == engine.waits["sample"] == []
        reads = Counter(wait.kind for wait in engine.waits["finish"])
        assert reads == {"the host waits for an event": engine.reads - before}


def test_an_adapter_with_dora_is_placed_without_waiting_for_steps_launched_meanwhile(base, adapters) -> None:
    with PaperGpu(SMALL) as gpu:
        engine = DryEngine(gpu, base, adapters, **SIZES)
        pieces = engine.engine.worker.placing(engine.adapter("dora"))
        next(pieces)
        overlap = torch.zeros(1, device="cuda")
        overlap += 1
        launched = len(gpu.machine.main.jobs)
        for _ in pieces:
            pass
        assert gpu.machine.main.done < launched
        assert overlap.item() == 1


@pytest.mark.parametrize(
    "family", ["gemma3", "mixtral", *map(long, ("granite", "olmo3", "phi3", "qwen2", "qwen3_moe", "smollm3"))]
)
def test_every_family_answers_as_on_a_cpu_without_a_wait_in_its_layers(family: str) -> None:
    answers_as_on_a_cpu(model_folder(family))


@pytest.mark.parametrize(
    "case", ["gpt_oss", "lfm2", *map(long, ("deepseek_v2", "granitemoehybrid, Mamba", "qwen3_next"))]
)
def test_blocks_without_kernels_of_their_own_answer_as_on_a_cpu_and_never_wait(
    case: str, tmp_path: Path
) -> None:
    """Latent attention, sinks, states and convolutions run in torch, whose tensors are made on the device."""
    engine = answers_as_on_a_cpu(make_family_folder(tmp_path, case))
    assert engine.waits["forward"] == []
    assert not engine.gpu.machine.captures, "a graph would freeze what the host decides"


def answers_as_on_a_cpu(folder: Path) -> DryEngine:
    """Plays two sequences, and holds them to a CPU's answers."""
    asked = {"a": [*range(40, 112)], "b": [7, 8]}  # past a window, and a decode step beside a prompt
    with reference_only():
        harness = EngineHarness(folder)
        wanted = harness.play([harness.log(id, tokens, max_tokens=6) for id, tokens in asked.items()])
    few = {"dtype": "float32", "max_seqs": 2, "max_batch_tokens": 64, "max_model_len": 128}
    with PaperGpu(SMALL) as gpu:
        engine = DryEngine(gpu, folder, **few)
        ready = set(gpu.machine.compiled)
        found = engine.play([engine.log(id, tokens, max_tokens=6) for id, tokens in asked.items()])
        assert differing(found, wanted) == []
        assert engine.waits["prepare"] == engine.waits["sample"] == []
        assert all("graphs.py" in wait.where[0] for wait in engine.waits["forward"])  # on trial
        assert gpu.machine.compiled == ready
        return engine


def test_half_precision_with_keys_and_values_in_8_bits_runs_to_its_end(base, adapters) -> None:
    with PaperGpu(SMALL) as gpu:
        engine = DryEngine(gpu, base, adapters, **(SIZES | {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}))
        ready = set(gpu.machine.compiled)
        engine.place(*RANKS, "dora")
        logs = [log for log in scene(engine, {}) if log.grammar is None]
        found = engine.play([log for log in logs if log.adapter is None or log.adapter in engine.held])
        assert {one.finish for one in found.values()} <= {"length", "stop"}
        assert gpu.machine.compiled == ready


@pytest.mark.parametrize("quantize", ["int4", long("fp8"), long("int8")])
def test_a_base_in_fewer_bits_answers_as_on_a_cpu(quantize: str, base, adapters) -> None:
    with reference_only():
        harness = EngineHarness(base, {"rank-64": adapters / "rank-64"}, quantize=quantize)
        asked = [
            harness.log("a", [*range(40, 112)], max_tokens=6),
            harness.log("b", [7, 8], "rank-64", max_tokens=6),
        ]
        wanted = harness.play(asked)
    with PaperGpu(SMALL) as gpu:
        engine = DryEngine(gpu, base, adapters, **(SIZES | {"dtype": "float32", "quantize": quantize}))
        ready = set(gpu.machine.compiled)
        engine.place("rank-64")
        found = engine.play([engine.log("a", [*range(40, 112)], max_tokens=6)])
        found |= engine.play([engine.log("b", [7, 8], "rank-64", max_tokens=6)])
        assert [one.tokens for one in found.values()] == [one.tokens for one in wanted.values()]
        runner = engine.engine.worker
        assert runner.graphs._capture is not None
        assert runner.prefill_graphs._capture is not None
        assert runner.prefill_graphs._graphs[128, False].trials < TRIALS, "the prompt ran without a graph"
        assert gpu.machine.compiled == ready


@pytest.mark.parametrize("name", ["gguf Q4_K", long("autoawq")])
def test_a_checkpoint_in_few_bits_stays_so_and_answers_as_its_plain_weights(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    if name in NAMES:
        shutil.copytree(DATA / name, folder)
        write_tokenizer(folder)
    else:
        sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
        folder = write_gguf(tmp_path / "a.gguf", model_folder("llama", **sizes), GgufType[name[5:]])
    few = {"max_seqs": 1, "max_batch_tokens": 32, "max_model_len": 64}
    answers, sizes_of_weights = [], []
    dtype = "auto"
    for in_bits in (True, False):
        with PaperGpu(SMALL) as gpu:
            engine = DryEngine(gpu, folder, dtype=dtype, cuda_graphs=in_bits, **few)
            ready = set(gpu.machine.compiled)
            answers.append(engine.play([engine.log("a", [*range(40, 80)], max_tokens=6)])["a"].tokens)
            runner = engine.engine.worker
            sizes_of_weights.append(runner.model.weight_bytes)
            dtype = str(runner.model.dtype).removeprefix("torch.")
            assert (gpu.machine.launches["block_linear_kernel"] > 0) == in_bits
            assert gpu.machine.compiled == ready
            assert not in_bits or runner.graphs._capture is not None
    assert answers[0] == answers[1]
    assert sizes_of_weights[0] < sizes_of_weights[1]


TIGHT = {
    "weights": (100_000, {}, r"The weights need .* GiB of memory are free on the GPU"),
    "cache": (8 << 20, {"kv_memory": 1 << 30}, "too little for 1GiB of KV cache"),
    "step": (4 << 20, {}, r"too little for a step of 4096 tokens \(--max-batch-tokens\) and 256 sequences"),
    "context": (
        4 << 20,
        {"max_model_len": 1024, "max_seqs": 4, "max_batch_tokens": 32},
        r"The GPU \(.*iB of --gpu-memory-utilization 0.9 free .*iB of them for a step\) holds \d+ tok",
    ),
}


@pytest.mark.parametrize("what", TIGHT)
def test_what_does_not_fit_is_refused_with_the_bytes_that_there_are(what: str, base) -> None:
    total, options, why = TIGHT[what]
    with PaperGpu(total) as gpu, pytest.raises(LoadError, match=why):
        DryEngine(gpu, base, dtype="float32", **options)


@pytest.mark.parametrize("share", [0.9, long(0.5)])
@pytest.mark.parametrize("tokens", [64, long(2048)])
def test_the_cache_gets_what_the_largest_steps_leave_of_the_share(share: float, tokens: int, base) -> None:
    total = 64 << 20
    with PaperGpu(total) as gpu:
        engine = DryEngine(
            gpu,
            base,
            dtype="float32",
            max_seqs=16,
            max_batch_tokens=tokens,
            max_model_len=128,
            gpu_memory_utilization=share,
        )
        runner = engine.engine.worker
        for spans in largest(engine.layout):
            rehearse_sampling(runner.rehearse(spans, everybody=True))
        assert gpu.machine.peak <= share * total
        # Of what is left, some is the memory that adapters may have besides; the pool has as much.
        assert gpu.machine.peak > share * total - runner.adapters.budget - (1 << 20)


def test_without_a_c_compiler_the_start_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from triton.runtime import driver

    for name, value in {"PATH": "", "TRITON_CACHE_DIR": str(tmp_path), "TRITON_LIBCUDA_PATH": "/"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CC", raising=False)
    with PaperGpu():
        monkeypatch.setattr(driver, "_active", None)
        with pytest.raises(LoadError, match=r"Failed to find C compiler.*Python's headers"):
            assemble(EngineOptions(tmp_path / "none", device="cuda"))
