"""The file that the server holds for the KV cache of one engine core after the other."""

import os
import signal
from types import SimpleNamespace

import pytest

from personae.actors.page_file import held_page_file

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only"),
]


@pytest.mark.parametrize(
    ("code", "stays"),
    [(-signal.SIGKILL, True), (-signal.SIGSEGV, False), (-signal.SIGTERM, False), (1, False), (0, False)],
)
async def test_only_an_engine_core_that_was_killed_leaves_its_pages(code: int, stays: bool) -> None:
    process = SimpleNamespace(returncode=None)

    async def launch() -> SimpleNamespace:
        return process

    with held_page_file() as held:
        launched = held.launch(launch)
        assert await launched() is process
        held.path.write_bytes(b"pages")
        process.returncode = code
        await launched()
        assert held.path.read_bytes() == (b"pages" if stays else b"")
        path = held.path
    assert not path.exists()
