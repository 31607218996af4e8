"""NVIDIA ModelOpt: FP8 with one scale, and NVFP4."""

from personae.engine.checkpoints.base import StoredTensor
from personae.engine.checkpoints.quantized.base import Compose, modules, take
from personae.engine.checkpoints.quantized.fp4 import compose_fp4
from personae.engine.checkpoints.quantized.fp8 import with_scales, without_kv_scales
from personae.engine.fields import Fields
from personae.errors import as_json

ALGORITHMS = ("FP8", "NVFP4")
MEANINGLESS = frozenset(
    ["config_groups", "ignore", "producer", "kv_cache_scheme", "kv_cache_quant_algo", "exclude_modules"]
)


def compose(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """See `Compose`: NVFP4."""
    for module in list(modules(stored, "weight_scale_2")):
        parts = take(stored, module, "weight", "weight_scale", "weight_scale_2")
        take(stored, module, "input_scale")
        stored[f"{module}weight"] = compose_fp4(parts, divides=False)
    return without_kv_scales(stored)


def translate(fields: Fields) -> Compose:
    """See `personae.engine.checkpoints.quantized`."""
    found = fields.get("quant_algo", "")
    if found not in ALGORITHMS:
        raise fields.error("quant_algo", f"{as_json(found)} is not supported, only {', '.join(ALGORITHMS)}")
    return with_scales if found == "FP8" else compose
