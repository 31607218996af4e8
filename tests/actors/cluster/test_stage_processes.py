"""Stages of a model whose ranks listen on TCP, as on other machines."""

import os
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from assembled import Assembled
from patience import PATIENCE
from tiny_adapters import ALL_TARGETS, make_adapter_folder
from tiny_models import model_folder

from personae.actors.cluster.contact import StageOrder
from personae.actors.cluster.stage_processes import StageProcesses
from personae.engine.machine_sockets import client_context, new_identity
from personae.engine.parallel.far_stages import CERTIFIED, ORDERS, FarStages, call
from personae.engine.parallel.ranks import RankEnded
from personae.engine.sequence import SequenceLog
from personae.errors import LoadError


@contextmanager
def stages(count: int, ranks: int = 1) -> Iterator[tuple[FarStages, list[StageProcesses]]]:
    """So many stages, of so many ranks each, besides the first."""
    identity = new_identity(CERTIFIED)
    found = [StageProcesses("127.0.0.1", StageOrder(ranks, 1, identity)) for _ in range(count)]
    try:
        yield FarStages(tuple(tuple(stage.addresses) for stage in found), identity), found
    finally:
        for stage in found:
            stage.end()


def logs(made: Assembled) -> list[SequenceLog]:
    return [
        made.log(f"{name} {temperature}", range(5, 30), name, temperature=temperature, seed=7)
        for name in (None, "all")
        for temperature in (0.0, 1.0)
    ]


def tokens(made: Assembled) -> dict[str, list[int]]:
    return {id: played.tokens for id, played in made.play(logs(made)).items()}


@pytest.mark.parametrize(("count", "ranks"), [(2, 1), (3, 1), (2, 2)])
def test_stages_on_other_machines_answer_as_one_process_with_adapters_that_only_the_first_rank_has(
    count: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_folder("llama", num_hidden_layers=3)
    with stages(count - 1, ranks) as (far, _):
        monkeypatch.chdir(tmp_path)  # the others cannot read a relative path
        make_adapter_folder(Path("all"), model, rank=8, targets=ALL_TARGETS, seed=3)
        adapters = {"all": Path("all")}
        made = Assembled(model, adapters, ranks, pipeline_parallel_size=count, far_stages=far)
        try:
            assert tokens(made) == tokens(Assembled(model, adapters))
        finally:
            made.end()


def test_the_end_of_a_rank_on_another_machine_is_the_end_of_its_stage_and_of_the_step() -> None:
    with stages(1, ranks=2) as (far, [stage]):
        made = Assembled(model_folder("llama"), None, 2, pipeline_parallel_size=2, far_stages=far)
        try:
            made.play([made.log("before", range(5, 30))])
            os.kill(stage.pids[1], signal.SIGKILL)
            with pytest.raises(RankEnded, match=r"of the model (has closed its connection|ended)"):
                made.play([made.log("after", range(5, 30))])
            for process in stage._processes:
                process.wait(10.0)
        finally:
            made.end()


def test_only_ranks_of_the_engine_can_call_a_rank() -> None:
    with stages(1) as (far, _):
        [[address]] = far.addresses
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1")
        with pytest.raises(OSError, match="certificate verify failed"):
            call(address, ORDERS, new_identity(CERTIFIED))
        knows_only_its_name = client_context(new_identity(CERTIFIED), far.identity.certificate)
        with (
            socket.create_connection(address, PATIENCE) as connection,
            knows_only_its_name.wrap_socket(connection, server_hostname=CERTIFIED) as other,
            pytest.raises((ssl.SSLError, ConnectionResetError)),
        ):
            other.recv(1)
        made = Assembled(model_folder("llama"), pipeline_parallel_size=2, far_stages=far)
        try:
            assert made.play([made.log("a", range(5, 30))])["a"].tokens
        finally:
            made.end()


def test_a_rank_that_cannot_be_reached_is_named_with_its_address() -> None:
    with stages(1) as (far, [stage]):
        stage.end()
        [[(host, port)]] = far.addresses
        with pytest.raises(LoadError, match=f"Rank 1 of the model can't be reached at {host}:{port}: "):
            Assembled(model_folder("llama"), pipeline_parallel_size=2, far_stages=far)
