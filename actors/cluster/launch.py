"""Several engines on the nodes of a Ray cluster, behind one frontend.

Ray places them, starts them and ends them. The tree of actors is that of `actors/replicas/launch.py`: an
engine that dies is restarted by its supervisor there, within its restart intensity. Restarting an engine
takes knowledge of its streams and of when to give up, and Ray has neither. Ray starts the actor that starts
engines (`ray_host.py`), on another node if necessary.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from anyio import to_thread

from personae.actors.adapter_folders import adapter_folders
from personae.actors.cluster.adapter_files import AdapterFiles
from personae.actors.cluster.contact import Contact
from personae.actors.cluster.listener import Listener, open_listener
from personae.actors.cluster.node import model_digest
from personae.actors.cluster.ray_cluster import RayCluster, open_ray
from personae.actors.cluster.remote_process import RemoteLaunch
from personae.actors.frontend.engine_process import Progress
from personae.actors.frontend.supervised_engine import MAX_RESTARTS
from personae.actors.kit.child import ReportIncident, log_incident
from personae.actors.multi_process import HANG_SECONDS, MultiProcessEngine
from personae.actors.options import OWN_MTP, ClusterOptions, EngineOptions, PrefillReplicas
from personae.actors.replicas.launch import MAX_LIVE, SILENCE_SECONDS, launch_replicas
from personae.engine.machine_sockets import new_identity
from personae.engine.tiers.transfer import CERTIFIED
from personae.engine.tokens import Tokenizer
from personae.errors import LoadError

log = logging.getLogger("personae.cluster")
CACHE_BYTES = 20 * 2**30  # for adapters on a node, without --adapter-cache-size


@asynccontextmanager
async def open_cluster(
    options: EngineOptions,
    cluster: ClusterOptions,
    count: int,
    on_progress: Progress | None = None,
    report: ReportIncident = log_incident,
    *,
    most: int | None = None,
    max_restarts: int = MAX_RESTARTS,
    hang_seconds: float = HANG_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
    prefill: PrefillReplicas = 0,
    by_load: bool = False,
) -> AsyncIterator[MultiProcessEngine]:
    """Do what `open_replicas` does, with engines on the nodes of the cluster that `cluster.ray` names. Raises
    LoadError if it has no room for the first `count`, or if a node refuses; later engines wait for room."""
    assert cluster.ray is not None
    model = options.model.absolute()
    tokenizer = await to_thread.run_sync(Tokenizer.load, model)
    source = await to_thread.run_sync(_source, options)
    weights = await to_thread.run_sync(_weights, options)
    draft = options.draft_model
    ranks, stages = options.tensor_parallel_size, options.pipeline_parallel_size
    gpus = cluster.gpus_per_replica
    if gpus is None:
        gpus = float(ranks * stages) if options.device == "cuda" else 0.0
    cpus = float(ranks * stages) if cluster.cpus_per_replica is None else cluster.cpus_per_replica
    terms = Contact(
        cache=None if cluster.adapter_cache is None else str(cluster.adapter_cache),
        cache_bytes=CACHE_BYTES if cluster.adapter_cache_size is None else cluster.adapter_cache_size,
        ranks=ranks,
    )
    async with (
        open_ray(cluster.ray, cluster.cluster_host, count, cpus, gpus, model, weights, stages) as ray,
        open_listener(ray.host, cluster.cluster_port) as listener,
    ):
        ray.admit = listener.admit
        log.info(
            "engines call %s:%d, %s",
            listener.host,
            listener.port,
            "TLS" if listener.certificate else "loopback",
        )
        most = max(most or count, count)
        async with launch_replicas(
            RaySource(ray, listener, source, terms, most),
            count,
            replace(
                options,
                model=model,
                draft_model=draft if draft in (None, OWN_MTP) else draft.absolute(),
                adapters=(),
                named_adapters=(),
                adapter_store=None,
                page_identity=new_identity(CERTIFIED) if options.kv_transfer else None,
            ),
            tokenizer,
            on_progress,
            report,
            max_restarts=max_restarts,
            hang_seconds=hang_seconds,
            silence_seconds=silence_seconds,
            max_live=MAX_LIVE * most,
            prefill=prefill,
            by_load=by_load,
        ) as engines:
            yield engines


@dataclass(frozen=True)
class RaySource:
    """A `ReplicaSource`: Ray finds each replica a place when there is one."""

    ray: RayCluster
    listener: Listener
    adapters: AdapterFiles
    terms: Contact
    most: int

    def acquire(self, replica: int) -> RemoteLaunch:
        """Return a launch at once. The launch waits for the place."""
        return RemoteLaunch(self.listener, partial(self.ray.place, replica), self.adapters, self.terms)

    def release(self, replica: int) -> None:
        """Give the place back in the background."""
        self.listener.tasks.start_soon(self.ray.leave, replica)


def _source(options: EngineOptions) -> AdapterFiles:
    try:
        return AdapterFiles(adapter_folders(options.adapters, options.named_adapters), options.adapter_store)
    except OSError as error:
        raise LoadError(f"The adapters can't be read: {error}") from None


def _weights(options: EngineOptions) -> str:
    try:
        return model_digest(options.model)
    except OSError as error:
        raise LoadError(f"The model at {options.model} can't be read: {error.strerror or error}") from None
