"""The thread that writes what stores keep in memory."""

import logging
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest
from patience import PATIENCE

from personae.api.telemetry.write_metrics import WriteFailureCollector
from personae.api.tenants.data import DataDir
from personae.api.tenants.flusher import WriteFailures, flushed
from personae.api.tenants.store import Identity
from personae.api.tenants.usage import UsageLedger
from personae.errors import StorageFailed

logger = logging.getLogger(__name__)
ANN = Identity("ann", "tenant")


@pytest.mark.parametrize("error", [ValueError("planted"), StorageFailed("The disk is full.")])
def test_the_thread_writes_again_after_any_error_which_is_logged_and_counted(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    failures, again, calls = WriteFailures(), Event(), 0

    def flush() -> None:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise error
        again.set()

    with flushed("turns", flush, 0.001, logger, failures):
        assert again.wait(PATIENCE)
    assert len([each for each in caplog.records if "turns could not be written" in each.message]) == 2
    (family,) = WriteFailureCollector(failures).collect()
    assert [(each.name, each.labels, each.value) for each in family.samples] == [
        ("personae:write_failures_total", {"what": "turns"}, 2)
    ]


def test_usage_that_the_database_refuses_takes_no_other_with_it(tmp_path: Path) -> None:
    with closing(DataDir(tmp_path)) as data:
        ledger = UsageLedger(data)
        ledger.add(ANN, "poet", 5, 0, 3)
        ledger.add(ANN, "bard", 2**70, 0, 3)  # more than a number of SQLite's can be
        ledger.add(ANN, None, 7, 0, 3)
        ledger.flush()
        rows, _ = ledger.rows(["adapter"])
        assert {row.adapter: row.prompt_tokens for row in rows} == {"": 7, "poet": 5}
        assert data.failures.counts() == {"usage": 1}
        ledger.add(ANN, "poet", 1, 0, 0)
        ledger.flush()
        assert {row.adapter: row.prompt_tokens for row in ledger.rows(["adapter"])[0]} == {"": 7, "poet": 6}


def test_usage_is_kept_in_memory_whatever_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise StorageFailed("planted")

    with closing(DataDir(tmp_path)) as data:
        ledger = UsageLedger(data)
        ledger.add(ANN, "poet", 5, 0, 3)
        ledger.saw("key")
        with monkeypatch.context() as patch:
            patch.setattr(data, "write", broken)
            with pytest.raises(StorageFailed):
                ledger.flush()
        ledger.add(ANN, "poet", 1, 0, 0)
        ledger.flush()
        assert [row.prompt_tokens for row in ledger.rows([])[0]] == [6]
