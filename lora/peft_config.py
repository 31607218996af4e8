"""Reads PEFT's `adapter_config.json`: the rank and the scaling of each module. Everything else is rejected.

A field is off if it is null, false, zero or empty. A field that is on must be read here, or must be known to
have no effect on what the trained tensors compute. Any other field would be ignored silently, so the adapter
is rejected with the field's name. Field names and defaults are PEFT's (LoraConfig, checked with 0.21).
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from personae.errors import AdapterError, as_json
from personae.lora.patterns import ModulePatterns
from personae.lora.strict_json import decode_object
from personae.lora.targets import Targets

MAX_CONFIG = 2**20  # bytes
MAX_RANK = 2**16
MAX_NAME = 256  # characters of a base's name in messages

# These have no effect on what the trained tensors compute: they say where they come from and how they were
# trained.
HARMLESS = {
    *(
        "base_model_name_or_path",
        "revision",
        "peft_version",
        "inference_mode",
        "runtime_config",
    ),
    *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_core", "qalora_group_size"),
    "ensure_weight_tying",  # the tensors show what is tied
    "auto_mapping",  # PEFT writes it when no task type was given; the class that it names is not loaded
    *("lora_dtype", "lorap_lr_ratio", "lorap_emb_lr"),  # ms-swift's
    *("loraplus_lr_ratio", "loraplus_lr_embedding", "unsloth_fixed"),
}
READ = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
    *("use_dora", "lora_bias", "bias", "modules_to_save", "trainable_token_indices"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("alora_invocation_tokens", "target_parameters"),
}
NEUTRAL = {"task_type": "CAUSAL_LM"}  # the supported values of other fields
BIASES = ("none", "lora_only", "all")
PATHS = {  # modules outside the layers that can be trained, and their names in a config
    "model.embed_tokens": (
        *("embed_tokens", "model.embed_tokens"),
        *("model.language_model.embed_tokens", "language_model.model.embed_tokens"),  # of a base with images
    ),
    "lm_head": ("lm_head", "language_model.lm_head"),
}
MAX_TOKENS = 4096  # in an invocation or a list of trained tokens
PLAIN_INITS = {"gaussian", "eva", "orthogonal", "mica"}  # these do not change the base weights

REASONS = {
    "arrow_config": "Arrow routing is not supported",
    "fan_in_fan_out": "transposed (Conv1D) weights are not supported",
    "kasa_config": "KaSA changes the base weights, which many adapters share",
    "layer_replication": "layer replication changes the base model, which many adapters share",
    "megatron_config": "Megatron's parallel layers are not supported",
    "monteclora_config": "MonteCLoRA samples its weights and is not supported",
    "task_type": "only adapters for text generation (CAUSAL_LM) are supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "use_qalora": "QALoRA is not supported",
    "velora_config": "VeLoRA is not supported; save the adapter without its training state",
}


class PeftConfig:
    """The part of a LoRA config that decides what its tensors mean.

    biases: whether biases of the base's modules were trained. saved: paths of modules that were trained in
    full. trained_tokens: by module path, the ids whose rows were trained. invocation: the tokens that
    activate the adapter (activated LoRA); if empty, it is always active. targets: which modules have LoRA.
    base: the name of the base that it was made for, "" if it has none. parameters: the names, or their ends,
    of bare parameters that have LoRA. swapped_experts: see `peft_experts.py`.

    Takes the decoded JSON. Raises AdapterError, with the field as `param`.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        if fields.get("peft_type") != "LORA":
            _refuse("peft_type", fields.get("peft_type"), "only LORA is supported")
        for field, value in fields.items():
            if value and field not in READ | HARMLESS and NEUTRAL.get(field) != value:
                _refuse(field, value, REASONS.get(field, "an unknown field may change the answers"))
        init = fields.get("init_lora_weights")
        if init not in (None, True, False) and str(init).lower() not in PLAIN_INITS:
            _refuse(
                "init_lora_weights",
                init,
                "this initialisation changes the base weights, which many adapters share; "
                "convert the adapter (save_pretrained with path_initial_model_for_weight_conversion)",
            )
        base = fields.get("base_model_name_or_path")
        self.base = base[:MAX_NAME] if isinstance(base, str) else ""
        self._divisor: Callable[[float], float] = math.sqrt if _flag(fields, "use_rslora") else float
        self._rank = _rank("r", fields.get("r", 8))
        self._alpha = _number("lora_alpha", fields.get("lora_alpha", 8))
        self._ranks = _patterns(fields, "rank_pattern", _rank)
        self._alphas = _patterns(fields, "alpha_pattern", _number)
        self.parameters = _names("target_parameters", fields.get("target_parameters"))
        self.swapped_experts = _version(fields.get("peft_version")) < (0, 19)
        self._dora = _flag(fields, "use_dora")
        self._lora_bias = _flag(fields, "lora_bias")
        bias = fields.get("bias") or "none"
        if bias not in BIASES:
            _refuse("bias", bias, f"it must be one of {', '.join(BIASES)}")
        self.biases = bias != "none"
        self.trained_tokens = _trained_tokens(fields.get("trainable_token_indices"))
        self.invocation = _token_ids("alora_invocation_tokens", fields.get("alora_invocation_tokens"))
        self.saved = self._saved_modules(fields.get("modules_to_save"))
        self.targets = Targets(fields, frozenset(path.rpartition(".")[2] for path in self.saved))
        if self._dora and self._lora_bias:
            _refuse("lora_bias", True, "PEFT has no DoRA with a bias on lora_B")
        for field in ("use_dora", "modules_to_save", "trainable_token_indices"):
            if self.invocation and fields.get(field):
                _refuse(field, fields[field], "it cannot be combined with activated LoRA")
        if self.invocation and self.biases:
            _refuse("bias", fields["bias"], "trained biases cannot be combined with activated LoRA")

    def rank(self, module: str) -> int:
        """The rank of a module, by its dotted name in the base model."""
        return int(self._ranks.get(module, self._rank))

    def scaling(self, module: str) -> float:
        """The factor of B A: alpha / rank, or alpha / sqrt(rank) for rsLoRA (arXiv 2312.03732)."""
        return self._alphas.get(module, self._alpha) / self._divisor(self.rank(module))

    def roles(self, kind: str) -> tuple[str, ...]:
        """The tensors that a module with low rank must have. kind: "linear", "embedding" or "output"."""
        roles = ("A", "B", "magnitude") if self._dora else ("A", "B")
        return (*roles, "lora_bias") if self._lora_bias and kind != "embedding" else roles

    def _saved_modules(self, names: Any) -> set[str]:
        known = {name: path for path, names in PATHS.items() for name in names}
        if names and (not isinstance(names, list) or any(str(name) not in known for name in names)):
            _refuse(
                "modules_to_save", names, f"of modules trained in full only {', '.join(known)} are supported"
            )
        return {known[str(name)] for name in names or ()}


def read_config(path: Path) -> PeftConfig:
    """The config in the file. Raises AdapterError if it is missing, malformed or not supported."""
    if not path.is_file():
        raise AdapterError(f"{path.name}: the adapter's folder has no such file")
    with path.open("rb") as file:
        text = file.read(MAX_CONFIG + 1)
    if len(text) > MAX_CONFIG:
        raise AdapterError(f"{path.name}: larger than {MAX_CONFIG} bytes", param=path.name)
    return PeftConfig(decode_object(text, path.name))


def _patterns(fields: dict[str, Any], field: str, check: Callable[[str, Any], float]) -> ModulePatterns:
    values = fields.get(field) or {}
    if not isinstance(values, dict):
        _refuse(field, values, "it must be an object")
    return ModulePatterns(field, {key: check(field, value) for key, value in values.items()})


def _names(field: str, value: Any) -> tuple[str, ...]:
    if value and (not isinstance(value, list) or not all(isinstance(name, str) and name for name in value)):
        _refuse(field, value, "it must be a list of names")
    return tuple(value or ())


def _version(value: Any) -> tuple[int, int]:
    """The version of PEFT that wrote the config; the newest if it does not say."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})", value) if isinstance(value, str) else None
    return (int(match[1]), int(match[2])) if match else (9999, 0)


def _flag(fields: dict[str, Any], field: str) -> bool:
    value = fields.get(field)
    if value not in (None, True, False):
        _refuse(field, value, "it must be true or false")
    return bool(value)


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    if not value:
        return ()
    if not isinstance(value, list) or len(value) > MAX_TOKENS:
        _refuse(field, value, f"it must be a list of at most {MAX_TOKENS} token ids")
    if any(type(id) is not int or not 0 <= id < 2**31 for id in value):
        _refuse(field, value, "a token id must be an integer of at least 0")
    return tuple(value)


def _trained_tokens(value: Any) -> dict[str, tuple[int, ...]]:
    """By module path. A plain list is for the embedding."""
    field = "trainable_token_indices"
    named = value if isinstance(value, dict) else {"embed_tokens": value}
    found: dict[str, tuple[int, ...]] = {}
    for name, ids in named.items():
        path = next((path for path, names in PATHS.items() if name in names), None)
        if path is None or path in found:
            _refuse(field, value, "only tokens of embed_tokens and lm_head are supported")
        found[path] = _token_ids(field, ids)
        if len(set(found[path])) != len(found[path]):
            _refuse(field, value, "a token is listed twice")
    return found


def _rank(field: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        _refuse(field, value, f"a rank must be an integer from 1 to {MAX_RANK}")
    return value


def _number(field: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= 1e30:
        _refuse(field, value, "it must be a finite number")
    return float(value)


def _refuse(field: str, value: Any, reason: str) -> NoReturn:
    raise AdapterError(f"adapter_config.json: {field[:80]} is {as_json(value)}: {reason}", param=field[:80])
