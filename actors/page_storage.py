"""Where pages of the KV cache are kept besides the engine's own memory, as the options say: tiers, other
engines, and a file that outlives the engine."""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from personae.actors.options import EngineOptions
from personae.actors.sizing import Sizes
from personae.engine.heads.head import Head
from personae.engine.kv import KVCache
from personae.engine.machine_sockets import client_context
from personae.engine.models.decoder import Decoder
from personae.engine.numerics import NumericsClass, weights_digest
from personae.engine.object_stores import LMCACHE, MOONCAKE, AsyncObjects, reason
from personae.engine.packed_weights import code_digest
from personae.engine.page_file import PageFile, open_page_file
from personae.engine.parallel.ranks import Ranks
from personae.engine.tiers.host_memory import HostTier
from personae.engine.tiers.nixl import WINDOW_BYTES, NixlAgent
from personae.engine.tiers.page_header import header_bytes
from personae.engine.tiers.peers import PeerTier
from personae.engine.tiers.remote import Objects, RemoteTier
from personae.engine.tiers.stack import stacked
from personae.engine.tiers.tier import Tier
from personae.engine.tiers.transfer import PageSource
from personae.errors import LoadError
from personae.kernels.sizes import size_text

KV_TIER_BYTES = 20 * 2**30
TOKEN_BYTES = 16  # at most, of a token in a page's key
ADAPTER_BYTES = 128  # of the digest of an adapter that becomes active inside the page


@dataclass(frozen=True, slots=True)
class PageStorage:
    """`tier`: all tiers as one. `source`: gives pages to other engines. `page_file`: has the KV cache, if
    that outlives the engine."""

    tier: Tier | None
    source: PageSource | None
    page_file: PageFile | None


def open_page_storage(
    options: EngineOptions,
    model: Decoder,
    sizes: Sizes,
    draft: Decoder | Head | None,
    numerics: NumericsClass,
    *,
    ranks: Ranks | None,
) -> PageStorage:
    """Open what the options name. Raises LoadError for what cannot be used."""
    device, layout = model.device, sizes.layout
    identity, page_bytes = _page_identity(options, model, sizes, draft, numerics)
    token_bytes = TOKEN_BYTES * layout.page_size + ADAPTER_BYTES
    tiers: list[Tier] = []
    source = None
    if options.gives_pages:
        source = PageSource(identity, page_bytes, _nixl_agent(options, page_bytes))
        certified = options.page_identity
        tls = None if certified is None else client_context(certified, certified.certificate)
        tiers.append(PeerTier(source, tls))
    if options.kv_host_bytes is not None:
        tiers.append(HostTier(options.kv_host_bytes, page_bytes, device))
    if options.kv_disk is not None:
        tiers.append(_open_disk(options.kv_disk, options, token_bytes, identity, page_bytes))
    if options.kv_remote is not None:
        object_bytes = header_bytes(token_bytes) + page_bytes
        objects = _open_objects(options.kv_remote, object_bytes)
        bound = KV_TIER_BYTES if options.kv_remote_bytes is None else options.kv_remote_bytes
        tiers.append(RemoteTier(objects, bound, page_bytes, identity))
    page_file = None
    if options.page_file is not None and device.type == "cpu" and ranks is None and draft is None:
        specs = [spec for spec in model.config.kv_specs if spec is not None]
        page_file = open_page_file(
            options.page_file,
            f"{identity}\n{code_digest()}",
            layout,
            layout.num_pages * page_bytes,
            2 * len(set(specs)),
        )
    return PageStorage(stacked(tiers, page_bytes), source, page_file)


def _page_identity(
    options: EngineOptions,
    model: Decoder,
    sizes: Sizes,
    draft: Decoder | Head | None,
    numerics: NumericsClass,
) -> tuple[str, int]:
    """What decides a page's content besides its tokens, and its bytes. Pages are for engines with the same
    numbers and the same layout."""
    layout, specs = sizes.layout, model.config.kv_specs
    page_bytes = KVCache.bytes_per_page(specs, layout.page_size, sizes.kv_dtype)
    identity = [msgspec.json.encode(numerics).decode(), repr(specs), str(layout.page_size)]
    if isinstance(draft, Head):
        assert options.draft_model is not None
        page_bytes += layout.page_size * draft.hidden_size * draft.dtype.itemsize
        head = options.model if str(options.draft_model) == "mtp" else options.draft_model
        identity += [weights_digest(head), str(draft.dtype), str(draft.layers)]
    return "\n".join(identity), page_bytes


def _open_disk(
    folder: Path, options: EngineOptions, token_bytes: int, identity: str, page_bytes: int
) -> Tier:
    """The tier of `--kv-disk`."""
    if not hasattr(os, "posix_fallocate"):
        raise LoadError("--kv-disk does not work on this system: it cannot reserve room in files.")
    from personae.engine.tiers.disk import DiskTier

    bound = KV_TIER_BYTES if options.kv_disk_bytes is None else options.kv_disk_bytes
    return DiskTier(
        folder / "pages",
        bound,
        page_bytes,
        identity,
        parts=options.share,
        token_bytes=token_bytes,
    )


def _nixl_agent(options: EngineOptions, page_bytes: int) -> NixlAgent | None:
    """The agent of `--kv-transfer-backend nixl`. Raises LoadError."""
    if options.kv_transfer_backend != "nixl":
        return None
    if page_bytes > WINDOW_BYTES:
        raise LoadError(
            f"--kv-transfer-backend nixl moves pages of up to {size_text(WINDOW_BYTES)}; "
            f"this model's have {size_text(page_bytes)}."
        )
    try:
        return NixlAgent()
    except ModuleNotFoundError:
        raise LoadError("--kv-transfer-backend nixl needs NIXL (pip install nixl).") from None
    except Exception as error:  # whatever the library raises
        raise LoadError(f"--kv-transfer-backend nixl cannot be used: {reason(error)}.") from None


def _open_objects(url: str, object_bytes: int) -> Objects:
    """The store of `--kv-remote`. Raises LoadError."""
    try:
        if url.startswith(LMCACHE):
            from personae.engine.tiers.lmcache import LMCacheObjects

            return LMCacheObjects(url, object_bytes)
        if url.startswith(MOONCAKE):
            from personae.engine.tiers.mooncake import MooncakeObjects

            return MooncakeObjects(url)
        return AsyncObjects(url)
    except Exception as error:
        raise LoadError(f"--kv-remote {url} cannot be used: {reason(error)}.") from None
