"""The study of tiers plays traces as they are published."""

from pathlib import Path

import msgspec

from personae.actors.simulation.workload import requests
from personae.actors.simulation.world import simulate
from personae.evals.tier_study import of_a_trace


def test_a_trace_is_played_at_its_times_and_blocks_that_are_asked_for_again_are_found(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    traced = [(0, 1600, 320, (7, 8, 9, 10)), (900, 1100, 64, (7, 8, 11)), (2500, 520, 1, (12, 13))]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    file.write_bytes(b"\n".join(msgspec.json.encode(dict(zip(names, one, strict=True))) for one in traced))
    scenario = of_a_trace(1, file, 10, seed=1)
    first, second, third = requests(scenario.workload, 1)
    assert [each.at for each in (first, second, third)] == [0.0, 0.9, 2.5]
    logs = [each.logs[0] for each in (first, second, third)]
    assert [(log.prompt_length, log.params.max_tokens) for log in logs] == [(50, 10), (34, 2), (16, 1)]
    assert logs[0].tokens[:32] == logs[1].tokens[:32]
    assert len({log.tokens[i : i + 16] for log, i in ((logs[0], 0), (logs[0], 16), (logs[2], 0))}) == 3
    report = simulate(scenario)
    assert (report.queries, report.hits) == (100, 32)
