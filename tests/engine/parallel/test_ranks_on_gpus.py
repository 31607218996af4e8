"""Ranks on GPUs: which GPU each takes, and the whole engine on simulated ones."""

import os
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from marks import long

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available(),
    reason="needs Triton's compiler, and no GPU",
)
from assembled import Assembled  # noqa: E402  # below the mark, which says what they need
from paper_gpu import PaperGpu  # noqa: E402
from paper_rank import PART_TOKENS, on_paper  # noqa: E402
from shared_model import answers  # noqa: E402
from tiny_adapters import make_adapter_folder  # noqa: E402
from tiny_models import model_folder  # noqa: E402

from personae.actors import rank_options  # noqa: E402
from personae.actors.options import EngineOptions  # noqa: E402
from personae.actors.rank_options import dist_library  # noqa: E402
from personae.engine.parallel import ranks as ranks_module  # noqa: E402
from personae.engine.parallel.messages import StartRank  # noqa: E402
from personae.engine.parallel.ranks import Ranks  # noqa: E402
from personae.engine.parallel.two_batches import TwoBatches  # noqa: E402
from personae.engine.worker import runner  # noqa: E402
from personae.errors import LoadError  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
CUDA = torch.device("cuda")
OWN, HALVES = {"enable_dp_attention": True}, {"enable_two_batch_overlap": True}


class Started:
    """A process that does not run, as it was started."""

    def __init__(self, _command: list[str], *, env: dict[str, str], pass_fds: list[int], **_: Any) -> None:
        self.environment = env
        self.line = Connection(os.dup(pass_fds[0]))

    def poll(self) -> None:
        """It has not ended."""

    wait = kill = poll


def test_each_rank_sees_the_gpu_with_its_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,2,5,0")
    monkeypatch.setattr(ranks_module.subprocess, "Popen", Started)
    ranks = Ranks(
        model_folder("llama"),
        2,
        2,
        dtype="float32",
        quantize=None,
        max_position=64,
        threads=1,
        device=CUDA,
        library="nccl",
    )
    started: Any = ranks._processes
    said = [msgspec.msgpack.decode(each.line.recv_bytes(), type=StartRank) for each in started]
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in started] == ["2", "5", "0"]
    assert [(each.rank, each.stage, each.device, each.library) for each in said] == [
        (1, 0, "cuda", "nccl"),
        (0, 1, "cuda", "nccl"),
        (1, 1, "cuda", "nccl"),
    ]
    assert len({each.store for each in said} - {0}) == 1
    ranks.end()


@pytest.mark.parametrize(
    ("device", "options", "said"),
    [
        ("cuda", {}, "The model's 4 ranks need 4 GPUs; there are 3."),
        (
            "cuda",
            {"dist_backend": "gloo"},
            "--dist-backend gloo needs --device cpu; on GPUs ranks have nccl.",
        ),
        ("cpu", {"dist_backend": "nccl"}, "--dist-backend nccl needs GPUs"),
    ],
)
def test_what_the_devices_do_not_have_is_refused_by_name(
    device: str, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_options, "visible_devices", lambda: ["0", "1", "2"])
    asked = EngineOptions(Path("model"), tensor_parallel_size=4, **options)
    with pytest.raises(LoadError, match=said):
        dist_library(asked, torch.device(device))


@pytest.mark.parametrize(
    ("family", "sizes", "memory"),
    [
        ("llama", {"ranks": 2}, None),  # the memory is measured
        ("llama", {"pipeline_parallel_size": 2}, 2**22),  # or given
        long("llama", {"ranks": 2, **HALVES}, None),
        long("qwen3_moe", {"ranks": 2, "expert_parallel_size": 2, **OWN}, None),
        long("qwen3_moe", {"ranks": 2, **OWN, **HALVES}, 2**22),
        long("qwen3_moe", {"ranks": 3, "expert_parallel_size": 2, "attention_ranks": 1, **OWN}, None),
        ("qwen3_moe", {"ranks": 3, "attention_ranks": 1, **OWN, **HALVES}, None),
    ],
)
def test_ranks_on_simulated_gpus_answer_as_one_process_on_a_cpu(
    family: str, sizes: dict[str, Any], memory: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".pkg"))
    monkeypatch.setattr(runner, "PART_TOKENS", PART_TOKENS)
    ran, run = list[TwoBatches](), TwoBatches.run

    def counted(halves: TwoBatches, *works: Any) -> tuple[Any, Any]:
        ran.append(halves)
        return run(halves, *works)

    monkeypatch.setattr(TwoBatches, "run", counted)
    base = model_folder(family)
    poet = make_adapter_folder(tmp_path / "poet", base, rank=8, targets=["q_proj", "v_proj", "o_proj"])
    adapters = {"poet": poet}
    asked = {"max_seqs": 4, "max_batch_tokens": 38, "max_model_len": 64}
    expected = answers(Assembled(base, adapters, **asked), 20)
    with PaperGpu() as gpu, on_paper(monkeypatch, tmp_path, 3):
        asked |= {"device": "cuda", "ranks": 1, "kv_memory": memory, **sizes}
        made = Assembled(base, adapters, **asked)
        ran.clear()
        try:
            assert answers(made, 20) == expected
        finally:
            made.end()
        assert bool(ran) == ("enable_two_batch_overlap" in sizes)
        assert not gpu.machine.captures


def test_both_halves_of_a_step_launch_on_its_stream() -> None:
    with PaperGpu():
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types here
        with torch.cuda.stream(stream):
            found = TwoBatches().run(torch.cuda.current_stream, torch.cuda.current_stream)
    assert found == (stream, stream)
