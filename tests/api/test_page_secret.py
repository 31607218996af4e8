"""The secret that names pages: kept with them, made once, and never half of one."""

import logging
from pathlib import Path

import pytest
from patience import soon
from tiny_models import model_folder
from virtual_clock import real_clock

from personae.api import page_secret
from personae.api.local import open_engine
from personae.api.options import ServeOptions
from personae.api.page_secret import SECRET_BYTES, kept_secret
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog
from personae.errors import LoadError

pytestmark = real_clock
pytest.importorskip("obstore", reason="obstore is not installed: pip install obstore")


async def test_servers_that_share_a_store_have_one_secret(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    first, in_store = await kept_secret(tmp_path / "disk", url)
    assert first is not None
    assert len(first) == SECRET_BYTES
    assert in_store
    assert await kept_secret(None, url) == (first, True)
    assert await kept_secret(tmp_path / "disk", None) != (first, False)
    assert await kept_secret(None, None) == (None, False)


@pytest.mark.parametrize("content", [b"", b"x" * (SECRET_BYTES - 1), b"x" * (SECRET_BYTES + 1)])
async def test_a_damaged_secret_in_a_store_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (tmp_path / "secret").write_bytes(content)
    assert await kept_secret(None, f"file://{tmp_path}") == (None, False)
    assert "--kv-remote has no secret" in caplog.text


async def test_a_store_that_fails_leaves_the_folders_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    here = await kept_secret(tmp_path / "disk", None)
    assert await kept_secret(tmp_path / "disk", f"file://{tmp_path}/file/below") == here
    assert "--kv-remote has no secret" in caplog.text
    caplog.clear()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sesame")
    monkeypatch.setattr(page_secret, "STORE_SECONDS", 0.2)
    with caplog.at_level(logging.DEBUG):
        assert await kept_secret(tmp_path / "disk", "s3://bucket/x") == here
    assert "sesame" not in caplog.text


async def test_servers_that_share_a_store_name_a_tenants_pages_alike_and_keep_them_there(
    tmp_path: Path,
) -> None:
    url = f"file://{tmp_path}/store"
    options = ServeOptions(
        model=model_folder("qwen3"), device="cpu", dtype="float32", one_process=True, kv_remote=url
    )
    salts = []
    for number in range(2):
        async with open_engine(options) as opened:
            salts.append(opened.client.salt("default"))
            prompt = tuple(range(4, 104))
            log = SequenceLog(
                f"{number}", prompt, 100, SamplingParams(max_tokens=4, seed=0), salt=salts[number]
            )
            async with opened.client.stream([log]) as stream:
                async for _ in stream:
                    pass
            await soon(lambda: len(pages_in(tmp_path)) >= 6, "the pages are stored")
    assert salts[0] == salts[1]
    assert len(pages_in(tmp_path)) == 6, "the second has the same"


def pages_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("store/*/*/*/*") if "#" not in path.name]  # what is being written


@pytest.mark.parametrize("option", ["kv_disk_bytes", "kv_remote_bytes"])
async def test_a_bound_without_its_tier_is_refused(option: str) -> None:
    options = ServeOptions(model=model_folder("qwen3"), **{option: 2**20})  # type: ignore[arg-type]  # its fields'
    with pytest.raises(LoadError, match=f"--{option.replace('_', '-')} needs --kv-"):
        async with open_engine(options):
            pass
