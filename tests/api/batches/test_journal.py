from pathlib import Path

import msgspec

from personae.api.batches.journal import ERRORS, OUTPUT, Journal
from personae.api.batches.model import BatchResponse, NotRun, OutputLine


def line(id: str, status: int) -> OutputLine:
    body = msgspec.json.encode({"usage": {"prompt_tokens": 2, "completion_tokens": 3}})
    return OutputLine("x", id, BatchResponse(status, "r", msgspec.Raw(body)), None)


def test_a_journal_takes_nothing_twice_and_survives_any_cut(tmp_path: Path) -> None:
    from personae.api.batches.model import OutputLine

    (tmp_path / "b").mkdir()
    journal = Journal(tmp_path / "b" / "one")
    journal.write(
        [line("a", 200), line("b", 400), line("a", 200), OutputLine("x", "c", None, NotRun("no", ""))]
    )
    journal.write([line("a", 200), line("d", 200)])
    whole = {name: journal.paths[name].read_bytes() for name in (OUTPUT, ERRORS)}
    assert [text.count(b"\n") for text in whole.values()] == [2, 2]
    assert journal.counts(9).completed == 2
    assert journal.counts(9).failed == 1
    assert journal.usage().total_tokens == 10
    for cut in (*range(0, len(whole[OUTPUT]), 19), len(whole[OUTPUT]) - 1, len(whole[OUTPUT])):
        journal.paths[OUTPUT].write_bytes(whole[OUTPUT][:cut])
        again = Journal(tmp_path / "b" / "one")
        kept = whole[OUTPUT][:cut].count(b"\n")
        assert again.counts(9).completed == kept
        again.write([line("a", 200), line("d", 200)])
        assert again.paths[OUTPUT].read_bytes().count(b"\n") == 2
        assert again.usage() == journal.usage()
