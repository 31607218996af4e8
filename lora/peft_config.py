"""Reads PEFT's `adapter_config.json`: the rank and the scaling of each module, and a refusal of all else.

A field counts as off when it is null, false, zero or empty. A field that is on must be one that is read here
or one known to have no effect on what the trained tensors compute; any other would be ignored in silence, so
the adapter is refused with the field's name. Field names and defaults are PEFT's (LoraConfig, checked with
0.21).
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from personae.errors import AdapterError
from personae.lora.patterns import ModulePatterns
from personae.lora.strict_json import decode_object

MAX_CONFIG = 2**20  # bytes
MAX_RANK = 2**16

# Of no effect on what the trained tensors compute: where they come from, how they were trained, and which
# modules were chosen (the tensors show it).
HARMLESS = {
    *(
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "peft_version",
        "inference_mode",
        "runtime_config",
    ),
    *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("megatron_core", "qalora_group_size"),
}
READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"}
NEUTRAL = {"bias": "none", "task_type": "CAUSAL_LM"}  # the values of other fields that are served
PLAIN_INITS = {"gaussian", "eva", "orthogonal", "mica"}  # these leave the base weights as they were

REASONS = {
    "alora_invocation_tokens": "activated LoRA is not supported",
    "arrow_config": "Arrow routing is not supported",
    "bias": "trained biases are not supported; train with bias='none'",
    "fan_in_fan_out": "transposed (Conv1D) weights are not supported",
    "kasa_config": "KaSA changes the base weights, which many adapters share",
    "layer_replication": "replicated layers make another base model",
    "lora_bias": "a bias on lora_B is not supported",
    "megatron_config": "Megatron's parallel layers are not supported",
    "modules_to_save": "modules trained in full are not supported",
    "monteclora_config": "MonteCLoRA samples its weights and is not supported",
    "target_parameters": "LoRA on bare parameters (as in mixtures of experts) is not supported",
    "task_type": "only adapters for text generation (CAUSAL_LM) are served",
    "trainable_token_indices": "trained tokens are not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "use_dora": "DoRA is not supported",
    "use_qalora": "QALoRA is not supported",
}


class PeftConfig:
    """The part of a LoRA config that decides what its tensors mean.

    Takes the decoded JSON. Raises AdapterError, with the field as `param`.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        if fields.get("peft_type") != "LORA":
            _refuse("peft_type", fields.get("peft_type"), "only LORA is served")
        for field, value in fields.items():
            if value and field not in READ | HARMLESS and NEUTRAL.get(field) != value:
                _refuse(
                    field, value, REASONS.get(field, "a field that is not known here may change the answers")
                )
        init = fields.get("init_lora_weights")
        if init not in (None, True, False) and str(init).lower() not in PLAIN_INITS:
            _refuse(
                "init_lora_weights",
                init,
                "this initialisation changes the base weights, which many adapters share; "
                "convert the adapter (save_pretrained with path_initial_model_for_weight_conversion)",
            )
        rslora = fields.get("use_rslora")
        if rslora not in (None, True, False):
            _refuse("use_rslora", rslora, "it must be true or false")
        self._divisor: Callable[[float], float] = math.sqrt if rslora else float
        self._rank = _rank("r", fields.get("r", 8))
        self._alpha = _number("lora_alpha", fields.get("lora_alpha", 8))
        self._ranks = _patterns(fields, "rank_pattern", _rank)
        self._alphas = _patterns(fields, "alpha_pattern", _number)

    def rank(self, module: str) -> int:
        """The rank of a module, by its dotted name in the base model."""
        return int(self._ranks.get(module, self._rank))

    def scaling(self, module: str) -> float:
        """What B A is multiplied by: alpha / rank, or alpha / sqrt(rank) for rsLoRA (arXiv 2312.03732)."""
        return self._alphas.get(module, self._alpha) / self._divisor(self.rank(module))


def read_config(path: Path) -> PeftConfig:
    """The config in the file. Raises AdapterError when it is missing, malformed or not served."""
    if not path.is_file():
        raise AdapterError(f"{path.name}: there is no such file in the adapter's folder")
    with path.open("rb") as file:
        text = file.read(MAX_CONFIG + 1)
    if len(text) > MAX_CONFIG:
        raise AdapterError(f"{path.name}: larger than {MAX_CONFIG} bytes")
    return PeftConfig(decode_object(text, path.name))


def _patterns(fields: dict[str, Any], field: str, check: Callable[[str, Any], float]) -> ModulePatterns:
    values = fields.get(field) or {}
    if not isinstance(values, dict):
        _refuse(field, values, "it must be an object")
    return ModulePatterns(field, {key: check(field, value) for key, value in values.items()})


def _rank(field: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        _refuse(field, value, f"a rank is an integer from 1 to {MAX_RANK}")
    return value


def _number(field: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= 1e30:
        _refuse(field, value, "it must be a finite number")
    return float(value)


def _refuse(field: str, value: Any, reason: str) -> NoReturn:
    raise AdapterError(f"adapter_config.json: {field[:80]} is {value!r:.80}: {reason}", param=field[:80])
