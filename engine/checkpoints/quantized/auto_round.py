"""AutoRound's own name for the layouts of other tools: `packing_format` says which."""

from functools import partial

from personae.engine.checkpoints.quantized import awq, compressed_tensors
from personae.engine.checkpoints.quantized.base import Compose
from personae.engine.checkpoints.quantized.gptq import (
    MEANINGLESS as GPTQ_MEANINGLESS,
)
from personae.engine.checkpoints.quantized.gptq import (
    Gptq2Tensor,
    GptqTensor,
    compose,
    read_bits,
    read_group,
)
from personae.engine.fields import Fields
from personae.errors import as_json

MEANINGLESS = GPTQ_MEANINGLESS | {
    *(
        "act_bits",
        "act_data_type",
        "act_dynamic",
        "act_group_size",
        "act_sym",
    ),  # activations stay as they are
}
PREFIX = "auto_round:"
PACKINGS = ("auto_gptq", "auto_round", "gptq", "gptq_v2", "auto_awq", "awq", "llm_compressor")


def translate(fields: Fields) -> Compose:
    """See `personae.engine.checkpoints.quantized`."""
    packing = fields.get("packing_format", f"{PREFIX}auto_gptq")
    name, kind = packing.removeprefix(PREFIX), fields.get("data_type", "int")
    if name not in PACKINGS:
        raise fields.error(
            "packing_format", f"{as_json(packing)} is not supported, only {', '.join(PACKINGS)}"
        )
    if kind not in (("mx_fp",) if name == "llm_compressor" else ("int",)):
        raise fields.error("data_type", f"{as_json(kind)} is not supported in {packing}")
    varied, size = bool(fields.raw("extra_config")), read_group(fields)
    if name == "llm_compressor":
        bits = frozenset({read_bits(fields, (4, 8))})
        none = frozenset[int]()
        return partial(compressed_tensors.compose, bits=bits, sizes=frozenset({size}), blocks=none)
    if name.endswith("awq"):
        read_bits(fields, (4,))
        return partial(awq.compose, size=size)
    tensor = Gptq2Tensor if name == "gptq_v2" else GptqTensor
    return partial(compose, kind=tensor, bits=read_bits(fields), size=size, varied=varied)
