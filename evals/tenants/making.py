"""Random adapters of a base, in PEFT's format."""

import json
from pathlib import Path

import httpx
import torch
from safetensors.torch import save

from personae.engine.config_file import read_config
from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE
from personae.lora.sites import PROJECTIONS


class AdapterMaker:
    """Makes adapters for the model in a folder. The same seed gives the same adapter."""

    def __init__(self, model: Path, targets: tuple[str, ...] = tuple(PROJECTIONS)) -> None:
        self._config = read_config(model)
        self._targets = targets

    def make(self, rank: int, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, bytes]:
        """The two files, by name."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer in range(self._config.layers):
            for module in self._targets:
                site = self._config.lora_sites[module]
                inputs, outputs = site.inputs, site.outputs
                path = f"base_model.model.model.layers.{layer}.{site.path}"
                a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
                b = torch.randn(outputs, rank, generator=generator) * 0.1 * rank**-0.5
                tensors[f"{path}.lora_A.weight"] = a.to(dtype)
                tensors[f"{path}.lora_B.weight"] = b.to(dtype)
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
        return {CONFIG_FILE: json.dumps(config).encode(), TENSORS_FILE: save(tensors)}

    def bytes_per_rank(self, dtype: torch.dtype = torch.float32) -> int:
        """The bytes of one rank in the file."""
        sites = [self._config.lora_sites[module] for module in self._targets]
        widths = sum(site.inputs + site.outputs for site in sites)
        return self._config.layers * widths * dtype.itemsize


def upload_of(name: str, files: dict[str, bytes], url: str | httpx.URL = "") -> httpx.Request:
    """The request that uploads it to a server."""
    parts = {field: (field, content, "application/octet-stream") for field, content in files.items()}
    return httpx.Request(
        "POST", httpx.URL(url).join("/v1/adapters"), data={"name": name, "replace": "true"}, files=parts
    )


async def push(client: httpx.AsyncClient, name: str, files: dict[str, bytes]) -> None:
    """Upload it; raises httpx.HTTPStatusError if it is refused."""
    response = await client.send(upload_of(name, files, client.base_url))
    response.raise_for_status()
