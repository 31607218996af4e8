"""A large upload is taken in with rests, so that streams have the processor."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from personae.api.http import upload
from personae.lora import throttle

BOUNDARY = "xyz"
CHUNK = 2**16


async def form(size: int) -> AsyncIterator[bytes]:
    yield f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'.encode()
    for _ in range(size // CHUNK):
        yield bytes(CHUNK)
    yield f"\r\n--{BOUNDARY}--\r\n".encode()


@pytest.mark.anyio
async def test_each_mebibyte_of_an_upload_is_followed_by_a_rest_of_three_times_its_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worked, rests = 0.0, []

    def thread_time() -> float:
        nonlocal worked
        worked += 0.002  # each look is two milliseconds of work later
        return worked

    async def sleep(seconds: float) -> None:
        nonlocal worked
        rests.append(seconds)
        worked += 5.0  # of others, on the same thread

    monkeypatch.setattr(throttle, "thread_time", thread_time)
    monkeypatch.setattr(upload, "sleep", sleep)
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    await upload.read_form(form(4 * 2**20), kind, tmp_path, texts=(), files={"file": 2**23})
    assert rests == pytest.approx([0.006] * 4)
    assert (tmp_path / "file").stat().st_size == 4 * 2**20


@pytest.mark.anyio
async def test_what_the_loop_does_beside_a_slow_upload_does_not_slow_it_further(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rests = []

    async def sleep(seconds: float) -> None:
        rests.append(seconds)

    # a second of others' work each time
    monkeypatch.setattr(throttle, "thread_time", iter(range(100)).__next__)
    monkeypatch.setattr(upload, "sleep", sleep)
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    await upload.read_form(form(2 * 2**20), kind, tmp_path, texts=(), files={"file": 2**23})
    assert max(rests) <= 0.05
