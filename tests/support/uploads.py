"""Uploads of adapters for a tiny base, intact and corrupted, and an app that receives them."""

import json
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from fake_engine import FakeEngine
from safetensors.torch import save
from starlette.applications import Starlette

from personae.api.adapters.files import STAGING
from personae.api.adapters.registry import Registry
from personae.api.app import create_app
from personae.api.responses.store import ResponseStore
from personae.api.settings import ApiSettings
from personae.api.tenants.data import DataDir
from personae.api.tenants.store import Role, TenantLimits, TenantStore
from personae.api.tenants.usage import UsageLedger
from personae.lora.bounds import AdapterBounds
from personae.lora.shapes import LoraShapes
from personae.lora.sites import sites

KEPT = "select digest from adapters union select digest from adapter_versions"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
SHAPES = LoraShapes(2, sites({"q": (8, 8), "v": (8, 4)}))
BOUNDS = AdapterBounds(SHAPES, max_rank=16, max_value=65504.0)


def tensors(rank: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """All tensors of an adapter, as PEFT names them."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(SHAPES.layers):
        for module, (inputs, outputs) in SHAPES.modules.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}_proj.lora_"
            found[f"{name}A.weight"] = torch.randn(rank, inputs, generator=generator)
            found[f"{name}B.weight"] = torch.randn(outputs, rank, generator=generator)
    return found


def config(rank: int = 2, **changes: Any) -> bytes:
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "task_type": "CAUSAL_LM", **changes}
    return json.dumps(fields).encode()


def whole(seed: int = 0, rank: int = 2) -> dict[str, bytes]:
    """The two files of an intact adapter."""
    return {CONFIG: config(rank), TENSORS: save(tensors(rank, seed))}


def raw_safetensors(header: object, data: bytes, length: int | None = None) -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@dataclass
class UploadFixture:
    """An app with tenants and a registry, over an engine."""

    data: DataDir
    tenants: TenantStore
    registry: Registry
    app: Starlette
    engine: Any

    def key(self, tenant: str, role: Role = "tenant", **limits: int) -> str:
        """A key of a tenant, which is created if it is new."""
        if tenant not in [known.name for known in self.tenants.list_tenants()]:
            self.tenants.create_tenant(tenant, TenantLimits(**limits))
        return self.tenants.create_key(tenant, role)

    def client(self, key: str | None = None) -> httpx.AsyncClient:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://localhost", headers=headers
        )

    def leftovers(self) -> list[str]:
        """Files in the data directory's adapters that no database row names."""
        self.registry.files._staging.settle()
        known = {row["digest"] for row in self.data.rows(KEPT)}
        staged = [path.name for path in (self.data.adapters / STAGING).iterdir()]
        return staged + [p.name for p in self.data.adapters.iterdir() if p.name not in {STAGING, *known}]


@contextmanager
def open_fixture(
    path: Path,
    engine: Any = None,
    bounds: AdapterBounds = BOUNDS,
    settings: ApiSettings | None = None,
    opened: DataDir | None = None,
) -> Iterator[UploadFixture]:
    """An app on a data directory, or on one that is open, with FakeEngine unless another engine is given."""
    engine = engine or FakeEngine()
    models = engine.models("default")
    with closing(opened or DataDir(path)) as data:
        tenants = TenantStore(data)
        with closing(Registry(data, next(iter(models)), set(models), bounds)) as registry:
            app = create_app(
                engine,
                settings,
                tenants=tenants,
                registry=registry,
                usage=UsageLedger(data),
                stored=ResponseStore(data),
            )
            yield UploadFixture(data, tenants, registry, app, engine)


async def upload(
    client: httpx.AsyncClient, name: str, files: dict[str, bytes], **fields: str
) -> httpx.Response:
    """Send an upload as any client would."""
    parts = {field: ("x", content, "application/octet-stream") for field, content in files.items()}
    return await client.post("/v1/adapters", data={"name": name, **fields}, files=parts)
