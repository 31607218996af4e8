"""What of the GPU benchmark needs no GPU: its checks find errors, its cases are what they say, its report."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from late_copies import LateCopies, LateEvent
from patience import PATIENCE
from recorded_graphs import RecordedGraphs

from personae.engine.layers.block import LayerSpec
from personae.engine.layers.mlp import MlpSpec
from personae.evals.bench.gpu import arriving, checks, engine, goals, layer, shapes
from personae.evals.bench.gpu.report import markdown
from personae.evals.bench.gpu.tables import slower
from personae.evals.bench.gpu.timing import Deadline
from personae.kernels import reference, registry
from personae.kernels.registry import OPERATORS, reference_only

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
REFERENCE = {name: getattr(reference, name) for name in (*OPERATORS, "expert_linear")}


def run(operators: dict, dtype: torch.dtype = torch.float32) -> list[checks.Check]:
    generator = torch.Generator().manual_seed(5)
    return list(
        chain(
            checks.sgmv_checks(operators, dtype, generator, width=64),
            checks.attention_checks(operators, dtype, generator, shrink=64),
            checks.expert_checks(operators, dtype, generator, width=64),
            checks.pointwise_checks(operators, dtype, generator),
            checks.sampling_checks(operators, generator, width=1000),
        )
    )


TINY = replace(
    engine.SHAPE,
    vocab_size=64,
    hidden_size=32,
    max_position=256,
    layer_specs=(LayerSpec(replace(engine.ATTENTION, heads=2, kv_heads=1, head_dim=16), MlpSpec(48)),) * 2,
)


def test_graphs_of_the_engines_step_are_checked_and_one_that_is_not_there_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = RecordedGraphs()
    monkeypatch.setattr(registry, "operators", recorded.operators)
    rig = engine.Rig(TINY, recorded, torch.Generator().manual_seed(1), torch.float32)
    found = list(engine.engine_checks(rig))
    assert len(found) == 8
    assert [check for check in found if not check.passed] == []
    assert len(recorded.recordings) == 3  # 16 rows with and without adapters, 6 rows with

    def refuse(_work: object) -> object:
        raise RuntimeError("no graphs here")

    broken = engine.Rig(TINY, refuse, torch.Generator().manual_seed(1), torch.float32)
    assert not any(check.passed for check in engine.engine_checks(broken))


def test_steps_of_cold_adapters_are_checked_and_one_that_does_not_wait_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found() -> list[checks.Check]:
        copies = LateCopies()
        rig = engine.Rig(TINY, RecordedGraphs(), torch.Generator().manual_seed(1), torch.float32, copies)
        copies.arrive(len(copies))
        return list(arriving.arriving_checks(rig, copies.host))

    whole = found()
    assert len(whole) == 8
    assert [check for check in whole if not check.passed] == []
    monkeypatch.setattr(LateEvent, "wait", lambda mark: None)
    assert not any(check.passed for check in found() if "before it was there" not in check.name)


@pytest.mark.parametrize("dtype", checks.LIMITS, ids=str)
def test_the_reference_passes_every_check(dtype: torch.dtype) -> None:
    found = run(REFERENCE, dtype)
    assert len(found) > 15
    assert [check for check in found if not check.passed] == []


def test_every_operator_that_is_wrong_is_found_out() -> None:
    def off(name: str):
        def operator(*args):
            result = REFERENCE[name](*args)
            if result is None:  # it works in place: on q, on the caches, on y
                target = {"append_kv": args[2:3], "rotary": args[:1], "sgmv": args[1][:1]}[name][0]
                target.mul_(1.5)
                return None
            if isinstance(result, tuple):
                return tuple(part * 1.5 for part in result)
            return result * 1.5

        return operator

    for name in REFERENCE:
        if name != "append_kv":  # what lies in the caches is taken as given
            assert not all(check.passed for check in run({**REFERENCE, name: off(name)})), name


def test_what_is_left_unwritten_fails() -> None:
    found = run({**REFERENCE, "silu_and_mul": lambda x: torch.empty(len(x), x.shape[1] // 2)})
    wrong = [check for check in found if not check.passed]
    assert [check.name for check in wrong] == ["silu_and_mul, torch.float32"]
    assert math.isnan(wrong[0].error)


def test_the_bytes_of_an_adapter_are_those_of_llama_8b() -> None:
    one = shapes.Mix("r16", (0,), (16,))
    assert round(one.lora_bytes * shapes.LAYERS / 1e6) == 84
    assert shapes.Mix("two of three", (0, 0, 2, None), (16, 16, 32)).lora_bytes == 3 * one.lora_bytes


def test_mixes_are_sorted_by_adapter_and_every_adapter_has_a_rank() -> None:
    for mix in shapes.mixes(64, seed=1):
        assert list(mix.rows) == sorted(mix.rows)
        assert len(mix.rows) == 64
        assert set(mix.rows) == set(range(len(mix.ranks)))


def test_a_work_list_has_a_segment_per_run_and_empty_ones_after() -> None:
    work = shapes.work_list((0, 0, None, 0, 2), 5, CPU)
    assert work.first_row.tolist() == [0, 3, 4, 0, 0]
    assert work.rows.tolist() == [2, 1, 1, 0, 0]
    assert work.adapter.tolist() == [0, 0, 2, 0, 0]


def test_rows_of_the_attention_batch_share_no_page() -> None:
    batch, num_pages = shapes.attention_batch([(1, 40), (5, 5), (3, 100)], CPU, seed=0)
    used = [batch.page_table[row, : -(-n // shapes.PAGE)].tolist() for row, n in enumerate([40, 5, 100])]
    flat = list(chain(*used))
    assert len(set(flat)) == len(flat) < num_pages
    assert len(batch.write_index) == 9 == int(batch.query_start[-1])


def test_a_step_with_adapters_that_no_row_takes_is_the_step_without(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"qkv": (32, (32, 16, 16)), "o": (32, (32,)), "gate_up": (32, (48, 48)), "down": (48, (32,))}
    for name, value in {
        "GROUPS": groups,
        "HIDDEN": 32,
        "KV": 16,
        "HEADS": 2,
        "KV_HEADS": 1,
        "DIM": 16,
    }.items():
        monkeypatch.setattr(layer, name, value)
    generator = torch.Generator().manual_seed(0)
    batch, num_pages = shapes.attention_batch([(1, 20)] * 3, CPU, seed=0)
    layers = [layer.BenchLayer(num_pages, generator) for _ in range(2)]
    inputs = layer.step_inputs(3, 20, generator)
    adapters = shapes.make_adapters((8,), 2, torch.bfloat16, generator, groups)
    with reference_only():
        base = layer.BenchStep(layers, batch, None, None).run(*inputs)
        none = layer.BenchStep(layers, batch, adapters, shapes.work_list((None,) * 3, 3, CPU)).run(*inputs)
        some = layer.BenchStep(layers, batch, adapters, shapes.work_list((0, None, None), 3, CPU)).run(
            *inputs
        )
    assert torch.equal(none, base)
    assert not torch.equal(some[0], base[0])
    assert torch.equal(some[1:], base[1:])
    with reference_only():
        turns = layer.BenchStep(layers * 2, batch, adapters, shapes.work_list((0,) * 3, 3, CPU)).run(*inputs)
        twice = replace(
            adapters, weight_pools={group: own * 2 for group, own in adapters.weight_pools.items()}
        )
        own = layer.BenchStep(layers * 2, batch, twice, shapes.work_list((0,) * 3, 3, CPU)).run(*inputs)
    assert torch.equal(turns, own), "layers whose adapters take turns"


def test_the_report_names_what_failed_and_what_was_left_out() -> None:
    failed = checks.Check("sgmv, one row", math.nan, 1e-2)
    assert not failed.passed
    text = markdown(
        {
            "device": "a GPU",
            "versions": {"torch": "2.11"},
            "seconds": 3.0,
            "bandwidth": 4.3e6,
            "rate": 8e8,
            "checks": [{"name": failed.name, "error": failed.error, "limit": 0.01, "passed": False}],
            "tables": {"Steps": [{"rows": 1, "us": 2.347}, {"rows": 16, "left out": "no time left"}]},
        }
    )
    assert "4.30 TB/s" in text
    assert "FAILED sgmv, one row: error nan, at most 0.01" in text
    assert text.splitlines()[-4:] == [
        "| rows | us | left out |",
        "|---|---|---|",
        "| 1 | 2.35 |  |",
        "| 16 |  | no time left |",
    ]


def test_slower_is_in_percent_and_a_deadline_passes() -> None:
    assert slower(110.0, 100.0) == pytest.approx(10)
    assert Deadline.after(-1).passed
    assert not Deadline.after(60).passed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_with_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "personae.evals.bench.gpu"],
        env={"PYTHONPATH": str(ROOT / ".pkg"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    assert "no CUDA GPU" in done.stderr


def steps(rows: int, adapters: str, slower: float, share: float) -> dict:
    return {
        "rows": rows,
        "adapters": adapters,
        "us a layer": 100.0,
        "slower by %": slower,
        "of the roofline": share,
    }


def test_goals_are_passed_missed_or_not_measured_and_low_rows_need_a_reason() -> None:
    rows = [
        steps(16, "one adapter, r16", 4.0, 0.9),
        steps(64, "one adapter, r16", 6.0, 0.6),
        steps(64, "all different, r16", 31.0, 0.95),
    ]
    found = goals.kernel_goals({goals.DECODE_STEPS: rows})
    assert [goal.verdict for goal in found] == ["not measured", "MISS", "pass", "MISS"]
    assert goals.Goal("a goal", 1.0, math.nan).verdict == "MISS"
    assert len(goals.low_lines({"Steps": rows})) == 1
    assert goals.low_lines({"Steps": rows})[0].endswith("0.60; NO REASON IS KNOWN")
    short = [{"tokens": 1, "us": 10.0, "of the roofline": 0.2}]
    assert "is about what launches take" in goals.low_lines({"Norms": short})[0]


def test_the_price_of_a_schema_and_wrong_answers_are_told_from_what_was_served(tmp_path: Path) -> None:
    for name, tokens in {"adapters-64": 1000, "bound-64": 970}.items():
        spread = {"p50": 0.1, "p99": 0.2}
        figures = {"output_tokens": tokens, "seconds": 1.0, "requests": 2, "completed": 2}
        played = {"figures": {**figures, "first": spread, "gap": spread}}
        (tmp_path / f"load-{name}").mkdir()
        (tmp_path / f"load-{name}" / "report.json").write_text(json.dumps({"played": [played]}))
    (tmp_path / "bundled").mkdir()
    checked = {"checks": [{"passed": True}, {"passed": False}]}
    (tmp_path / "bundled" / "gpu.json").write_text(json.dumps(checked))
    text = goals.summary(tmp_path)
    assert "| the price of a schema at 64 clients | 2 % | 3.09 % | MISS |" in text
    assert "| answers of the bundled model that differ from a CPU's | 0 | 1.00 | MISS |" in text
    assert "| requests that failed | 0 | 0.00 | pass |" in text
