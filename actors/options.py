"""What an engine is asked for, as plain data that travels to the engine core's process."""

import hashlib
import hmac
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec


class EngineOptions(msgspec.Struct, frozen=True):
    """Everything that opening an engine needs; None means that the engine chooses.

    `model` is a Hugging Face model folder. Each sub-folder of each folder in `adapters` is an adapter,
    known by its folder's name; those that come later lie in `adapter_store`, by digest. `served_model_name`
    is the base's name, or all of its names; else its folder's. `kv_cache_dtype`:
    "fp8" keeps keys and values in half the memory. `kv_memory` and `adapter_memory` are in bytes, the other
    sizes are in tokens or sequences; `background_tokens` is what batches may have of a step beside other
    requests. `secret` is what the tenants' prefix-cache salts are derived from. `cuda_graphs`: on a GPU
    decode steps are captured as graphs (`engine/graphs.py`). `quantize`: how the base's weights
    are kept, None for as `dtype` says.
    """

    model: Path
    adapters: tuple[Path, ...] = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    max_seqs: int | None = None
    kv_memory: int | None = None
    adapter_memory: int | None = None
    adapter_store: Path | None = None
    served_model_name: str | tuple[str, ...] | None = None
    secret: bytes | None = None
    background_tokens: int | None = None
    cuda_graphs: bool = True
    quantize: str | None = None

    def base_names(self, own: str) -> tuple[str, ...]:
        """The names of the base, at least one, each once; its `own` if it is given none."""
        given = self.served_model_name
        names = (given,) if isinstance(given, str) else given or ()
        return tuple(dict.fromkeys(names)) or (own,)

    def salts(self) -> Callable[[str], bytes]:
        """Each tenant's prefix-cache salt: derived from `secret`, or from one that is drawn now."""
        secret = self.secret or secrets.token_bytes(32)
        return lambda tenant: hmac.digest(secret, tenant.encode(), hashlib.sha256)
