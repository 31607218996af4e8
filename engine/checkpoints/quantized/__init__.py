"""Quantized checkpoints, one file for each tool's format, imported when a `config.json` names it.

A format's file has one function, `translate(fields) -> Compose`. It reads the `quantization_config` and
returns what turns the tensors of the files into the decoder's: a module's packed values, scales and zero
points become one `PackedTensor`, named as the plain weight would be. To add a format, write its file and add
its `quant_method` here.
"""

from importlib import import_module

from personae.engine.checkpoints.quantized.base import Compose
from personae.engine.checkpoints.quantized.fp8 import with_scales
from personae.engine.fields import Fields
from personae.errors import as_json

FORMATS = {
    "auto-round": "auto_round",
    "awq": "awq",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
    "fp8": "fp8",
    "gptq": "gptq",
    "modelopt": "modelopt",
    "mxfp4": "mxfp4",
    "torchao": "torchao",
}
_SECTION, _METHOD = "quantization_config", "quant_method"


def read_format(config: Fields) -> Compose:
    """The format that the fields of a `config.json` name. Without one, only weights in FP8 have scales.

    Raises ModelLoadError, which names the format or the key that is not supported.
    """
    inside = config.section("text_config")
    place = config if _SECTION in config or inside is None else inside
    fields = place.section(_SECTION)
    if fields is None:
        return with_scales
    method = fields.get(_METHOD, "")
    if method not in FORMATS:
        raise fields.error(
            _METHOD, f"{as_json(method)} is not supported; supported are: {', '.join(FORMATS)}"
        )
    module = import_module(f"{__name__}.{FORMATS[method]}")
    compose: Compose = module.translate(fields)
    for section, name, value in fields.unread():
        if name not in module.MEANINGLESS:
            raise section.error(name, f"{as_json(value)} is not supported for {method}")
    return compose
