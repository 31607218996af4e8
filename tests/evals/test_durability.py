"""A server that is killed while clients store, in the form that takes seconds."""

from pathlib import Path

from tiny_models import model_folder

from personae.evals.durability import play_kills


def test_what_a_server_acknowledged_is_there_after_it_was_killed_and_nothing_twice(tmp_path: Path) -> None:
    options = [str(model_folder("qwen3")), "--device", "cpu", "--kv-memory", "64MiB"]
    acknowledged, wrong = play_kills(options, tmp_path, count=2, seed=0, longest=1.5)
    assert wrong == []
    assert acknowledged.responses
    assert acknowledged.background
    assert any(acknowledged.turns.values())
