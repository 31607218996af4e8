"""Planning replicas and ranks: the arithmetic agrees with the simulator, and wrong input is named."""

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from tiny_models import model_folder
from typer.testing import CliRunner

from personae.actors.deployment.devices import DEVICES, parse_devices
from personae.actors.deployment.estimate import Estimate, Layout, Load, estimates, expected
from personae.actors.simulation.scenario import Scenario
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.workload import SimulatedWorkload
from personae.actors.simulation.world import simulate
from personae.api.cli import app
from personae.api.commands import plan
from personae.engine.checkpoints import open_checkpoint
from personae.engine.loader import Described, describe
from personae.errors import LoadError

SMALL = replace(DEVICES["cpu"], memory=1e7)  # the tiny models have about 1 MB of weights


def described(family: str = "llama", **changes: Any) -> Described:
    checkpoint = open_checkpoint(model_folder(family, **changes))
    return describe(checkpoint, device=torch.device("cpu"), dtype="float32", quantize=None)


@pytest.mark.parametrize(
    ("use", "runs_ahead", "stages"),  # of the most that one replica can answer
    [
        *((use, ahead, 1) for use in (0.1, 0.5, 0.75) for ahead in (False, True)),
        (0.1, False, 2),
        (0.75, False, 2),
    ],
)
def test_the_expected_times_are_those_of_the_simulator(use: float, runs_ahead: bool, stages: int) -> None:
    costs = Costs(step=0.02, token=0.0001, row=0, adapter=0, context=1e-6, host=0, rests=False, start=0)
    costs = replace(costs, runs_ahead=runs_ahead)
    prompt, longest = 200, 40
    load = SimulatedWorkload(
        requests=150 if use < 0.5 else 400,
        adapters=0,
        prompt=(prompt, prompt),
        answer=(longest, longest),
        prefixed=0,
        schemas=0,
        siblings=0,
        leaves=0,
        slow=0,
        speculates=False,
    )
    scenario = Scenario(
        seed=3,
        costs=costs,
        pages=4096,
        page_size=16,
        slots=256,
        batch=4096,
        window=64,
        max_live=4096,
        lull=600,
        stages=stages,
    )
    answer = 29  # an answer may end before its longest: with each token by 1/64
    most = expected(costs, Load(1, prompt, answer, 1024), rows=256, stages=stages).most
    rate = use * most
    report = simulate(replace(scenario, workload=replace(load, rate=rate)))
    assert report.tokens / report.requests == pytest.approx(answer, rel=0.1)
    found = expected(costs, Load(rate, prompt, answer, 1024), rows=256, stages=stages)
    assert median(report.waits) == pytest.approx(found.first, rel=0.35)
    assert median(report.paces) == pytest.approx(found.gap, rel=0.35)


def test_more_devices_answer_more_requests_and_the_best_layout_comes_first() -> None:
    load = Load(rate=1.0, prompt=64, answer=32, context=256)
    few, many = (estimates(described(), DEVICES["cpu"], count, load) for count in (1, 4))
    assert [each.layout for each in few] == [Layout(1, 1, 1)]
    layouts = {(each.layout.tensor, each.layout.stages, each.layout.replicas) for each in many}
    assert layouts == {(1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1), (4, 1, 1)}
    assert max(each.most for each in many) > 2 * few[0].most
    seconds = [each.seconds(load) for each in many]
    assert seconds == sorted(seconds)


def test_ranks_need_less_memory_each() -> None:
    load = Load(rate=0.1, prompt=64, answer=32, context=256)
    found = {each.layout: each for each in estimates(described(), SMALL, 4, load)}
    one, two = found[Layout(1, 1, 4)], found[Layout(2, 1, 2)]
    assert 0.4 * one.weight_bytes < two.weight_bytes < 0.6 * one.weight_bytes
    assert two.kv_tokens > 2 * one.kv_tokens


def test_attention_by_sequences_has_room_for_more_tokens_where_ranks_would_have_the_same_keys() -> None:
    load = Load(rate=0.1, prompt=64, answer=32, context=256)
    model = described("mixtral", num_local_experts=8)
    found = {each.layout: each for each in estimates(model, SMALL, 4, load)}
    tensor, attention = found[Layout(4, 1, 1)], found[Layout(1, 1, 1, attention=4)]
    whole = found[Layout(1, 1, 4)]
    assert tensor.weight_bytes < attention.weight_bytes < whole.weight_bytes  # attention is not divided
    assert attention.kv_tokens > tensor.kv_tokens  # two heads of keys and values on four ranks
    assert attention.layout.runs
    assert not Layout(1, 2, 1, attention=2).runs
    assert {each.attention for each in {one.layout for one in estimates(described(), SMALL, 4, load)}} == {1}


@pytest.mark.parametrize("device", ["H100", "cpu"])
def test_a_plan_gives_no_command_that_the_server_refuses(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_sequences_first(*given: Any) -> list[Estimate]:
        first = Layout(1, 2, 1, attention=2)
        [plain, *_] = [each for each in estimates(*given) if each.layout.attention == 1]
        return [replace(plain, layout=first), plain]

    monkeypatch.setattr(plan, "estimates", by_sequences_first)
    asked = ["--devices", f"4x{device}", "--context", "256", "--rate", "1"]
    found = CliRunner().invoke(app, ["plan", "--model", str(model_folder("qwen3_moe")), *asked])
    assert found.exit_code == 0, found.output
    assert "--enable-dp-attention" not in found.output
    assert "Personae does not attend by sequences in several stages so far." in found.output


def test_a_step_of_few_tokens_reads_few_experts() -> None:
    load = Load(rate=0.001, prompt=16, answer=8, context=64)
    busy = replace(load, rate=1e4)
    slow = replace(DEVICES["cpu"], bandwidth=1e6)
    steps = [estimates(described("qwen3_moe"), slow, 1, each)[0].costs for each in (load, busy)]
    assert steps[0] is not None
    assert steps[1] is not None
    assert steps[0].step < steps[1].step


def test_a_model_that_does_not_fit_says_so() -> None:
    load = Load(rate=1.0, prompt=64, answer=32, context=256)
    [found] = estimates(described(), replace(SMALL, memory=1e5), 1, load)
    assert found.problem == "the weights do not fit"
    weights = found.weight_bytes
    [found] = estimates(described(), replace(SMALL, memory=(weights + 1000) / 0.9), 1, load)
    assert found.problem is not None
    assert "the KV cache has room for" in found.problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xTPU", "write a number and a kind, as in 8xH100. The kinds are H100,"),
        ("0xH100", "the number must be 1 to 1024"),
        ("9999xL4", "the number must be 1 to 1024"),
        ("eight H100", "write a number and a kind"),
        ("", "write a number and a kind"),
    ],
)
def test_devices_that_are_not_known_are_refused(text: str, said: str) -> None:
    with pytest.raises(LoadError, match=said):
        parse_devices(text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--devices 8xTPU --context 256 --rate 1", "--devices 8xTPU"),
        ("--devices H100 --context 4096 --rate 1", "--context 4096 is more than the model's own 1024 tokens"),
        ("--devices H100 --context 256 --rate 0", "--rate 0: it must be a positive number"),
        ("--devices H100 --context 256 --rate nan", "--rate nan: it must be a positive number"),
        ("--devices H100 --context 256 --rate 1 --prompt 250", "--prompt 250 and --answer 64 are more than"),
    ],
)
def test_a_plan_of_wrong_input_names_the_option(arguments: str, said: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--model", str(model_folder("llama")), *arguments.split()])
    assert result.exit_code == 2
    assert said in result.output


def test_a_plan_takes_a_model_as_serve_does(tmp_path: Path) -> None:
    asked = ["--devices", "2xcpu", "--context", "256", "--rate", "1"]
    demo = CliRunner().invoke(app, ["plan", "--model", "demo", *asked])
    assert demo.exit_code == 0, demo.output
    assert "personae serve demo --device cpu --max-model-len 256" in demo.output
    missing = CliRunner().invoke(app, ["plan", "--model", str(tmp_path / "nothing"), *asked])
    assert missing.exit_code == 2
    assert "does not exist" in missing.output


def test_a_plan_shows_the_layouts_and_the_command_for_the_best(tmp_path: Path) -> None:
    folder = str(model_folder("llama"))
    command = ["plan", "--model", folder, "--context", "256"]
    enough = CliRunner().invoke(app, [*command, "--devices", "2xcpu", "--rate", "1"])
    assert enough.exit_code == 0, enough.output
    assert "on 2 CPU: 1 requests/s of 128 + 64 tokens" in enough.output
    assert f"personae serve {folder} --device cpu --max-model-len 256" in enough.output
    too_many = CliRunner().invoke(app, [*command, "--devices", "2xcpu", "--rate", "1e9"])
    assert too_many.exit_code == 1
    assert "Not enough: at most" in too_many.output
