"""The server that lives as long as a `with` block, with a shell script in place of the server."""

import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest
from programs import Program

from personae.errors import ModelLoadError
from personae.evals.served import Served, exit_on_sigterm

READY = "echo personae ready http://127.0.0.1:9 model=base adapters=0; exec sleep 600"


def engine_spec(folder: Path, text: str) -> str:
    path = folder / "server"
    path.write_text(f"#!/bin/sh\necho $$ > {folder}/pid\n{text}\n")
    path.chmod(0o700)
    return str(path)


def epochs(folder: Path) -> bool:
    try:
        os.kill(int((folder / "pid").read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def test_the_server_ends_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", engine_spec(tmp_path, READY))
    before = signal.getsignal(signal.SIGTERM)
    with exit_on_sigterm(), Served([]) as server:
        assert server.url == "http://127.0.0.1:9"
        assert epochs(tmp_path)
    assert not epochs(tmp_path)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_server_that_does_not_start_is_an_error_that_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", engine_spec(tmp_path, "exit 7"))
    served = Served([], tmp_path / "server.log")
    with pytest.raises(ModelLoadError, match=r"ended with 7 .*server\.log"), served:
        pass


def test_a_program_that_is_told_to_stop_takes_the_server_with_it(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import sys, anyio
        from personae.evals.served import Served, exit_on_sigterm
        sys.executable = {engine_spec(tmp_path, READY)!r}

        async def main():
            served = Served([])
            await anyio.to_thread.run_sync(served.__enter__)
            try:
                print("there", flush=True)
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(served.__exit__)

        with exit_on_sigterm():
            anyio.run(main)
    """)
    with Program("-c", code) as program:
        assert program.line() == "there\n"
        program.process.terminate()
        program.end(128 + signal.SIGTERM)
    assert not epochs(tmp_path)
