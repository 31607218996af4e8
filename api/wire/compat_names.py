"""Names of other servers for the fields, routes and options of this one, so that refusals can say the right
name.

vLLM, SGLang, LoRAX, llama.cpp, and OpenAI's other routes; docs/guide/migrating.md has the details.
"""

import re
from collections.abc import Collection
from itertools import pairwise

_PLACE = re.compile(r"\[\d+\]")
_LENGTH = ("max_tokens", "max_output_tokens")
_SCHEMA = ("response_format.json_schema", "text.format")

_FIELDS: dict[str, tuple[str, ...]] = {
    "adapter_id": ("model",),
    "adapters[].id": ("adapters[].name",),
    "adapters[].scale": ("adapters[].weight",),
    "content": ("prompt", "messages", "input"),
    "ebnf": ("structured_outputs.grammar",),
    "format": _SCHEMA,
    "function_call": ("tool_choice",),
    "functions": ("tools",),
    "grammar": ("structured_outputs.grammar",),
    "ids": ("tokens",),
    "input": ("messages", "prompt"),
    "input_ids": ("prompt", "tokens"),
    "inputs": ("messages", "prompt", "input"),
    "json_schema": _SCHEMA,
    "lora": ("adapters",),
    "lora_name": ("model",),
    "lora_path": ("model",),
    "lora_request": ("model",),
    "max_completion_tokens": _LENGTH,
    "max_new_tokens": _LENGTH,
    "max_output_tokens": _LENGTH,
    "max_thinking_tokens": ("thinking_token_budget",),
    "max_tokens": _LENGTH,
    "merged_adapters": ("adapters",),
    "messages": ("input",),
    "n_predict": _LENGTH,
    "n_probs": ("logprobs", "top_logprobs"),
    "num_predict": _LENGTH,
    "output_format": ("output_config.format",),
    "prompt": ("messages", "input"),
    "reasoning": ("reasoning_effort",),
    "reasoning_effort": ("reasoning.effort",),
    "regex": ("structured_outputs.regex",),
    "repeat_penalty": ("repetition_penalty",),
    "response_format": _SCHEMA,
    "response_format.schema": ("response_format.json_schema.schema",),
    "response_format.strict": ("response_format.json_schema.strict",),
    "stop_sequences": ("stop",),
    "text": ("prompt", "messages"),
    "text.format.json_schema": ("text.format",),
    "think": ("reasoning_effort", "reasoning.effort"),
    "thinking": ("reasoning_effort", "reasoning.effort"),
    "token_ids": ("tokens",),
    "tool_choice.function": ("tool_choice",),
    "tool_choice.name": ("tool_choice.function.name",),
    "tools[].description": ("tools[].function.description",),
    "tools[].function": ("tools[]",),
    "tools[].function.inputSchema": ("tools[].function.parameters",),
    "tools[].function.input_schema": ("tools[].function.parameters",),
    "tools[].inputSchema": ("tools[].function.parameters",),
    "tools[].input_schema": ("tools[].function.parameters",),
    "tools[].name": ("tools[].function.name",),
    "tools[].parameters": ("tools[].function.parameters",),
    "tools[].strict": ("tools[].function.strict",),
    **{
        f"{place}.{keyword}": (f"{place}.schema.{keyword}",)
        for place in _SCHEMA
        for keyword in ("$defs", "$schema", "additionalProperties", "properties", "required", "title", "type")
    },
}
"""A field of another server or route, and the fields that it may be here. The first that the request can have
counts."""

_ROUTES = {
    "apply-template": "/tokenize",
    "chat": "/v1/chat/completions",
    "complete": "/v1/completions",
    "completion": "/v1/completions",
    "embed": "/v1/embeddings",
    "evals": "/v1/eval_reports",
    "generate": "/v1/completions",
    "generate_stream": "/v1/completions",
    "get_server_info": "/v1/models",
    "health_generate": "/ready",
    "healthz": "/health",
    "get_model_info": "/v1/models",
    "infill": "/v1/completions, with `suffix`",
    "invocations": "/v1/chat/completions",
    "livez": "/health",
    "lora-adapters": "/v1/adapters",
    "readyz": "/ready",
    "redoc": "/docs",
    "props": "/v1/models",
    "ps": "/v1/models",
    "render": "/tokenize",
    "reranking": "/v1/rerank",
    "server_info": "/v1/models",
    "show": "/v1/models",
    "slots": "/metrics",
    "tags": "/v1/models",
    "tokenizer_info": "/v1/models",
}

_NOT_SERVED = {
    "classify": "Classification is not served",
    "edits": "Making images is not served",
    "generations": "Making images is not served",
    "moderations": "Moderation is not served",
    "pooling": "Pooling is not served",
    "speech": "Speech is not served",
    "transcriptions": "Transcription is not served",
    "translations": "Translation of speech is not served",
    "videos": "Making videos is not served",
}
"""The last part of another server's route, and why it is not served."""

_AWAKE = "An engine ends while nobody asks: `personae serve --model NAME=MODEL --keep-alive SECONDS`."
_CACHES = "Memory that is needed is taken from the cache; `cache_salt` keeps requests apart in it."
_STAYS = "Models are chosen at the start of the server; /v1/adapters uploads and removes adapters."

_INSTEAD = {
    "assistants": "Assistants are not served; /v1/responses has tools, and conversations that it keeps.",
    "api/copy": _STAYS,
    "api/create": _STAYS,
    "api/delete": _STAYS,
    "api/push": _STAYS,
    "containers": "No code is run here; the client runs the tools that the model calls.",
    "fine_tuning": "Training is not served; POST /v1/adapters takes a trained adapter.",
    "flush_cache": _CACHES,
    "messages/batches": "Batches of messages are not served; /v1/batches takes other requests.",
    "pull": "Models are loaded at the start: `personae serve org/name` downloads one.",
    "realtime": "Speech is not served: this server generates text.",
    "reset_prefix_cache": _CACHES,
    "responses/compact": "Nothing is compacted; a client sends less, or another `previous_response_id`.",
    "sleep": _AWAKE,
    "threads": "Threads are not served; /v1/conversations keeps what was said, for /v1/responses.",
    "uploads": "A file comes in one request: POST /v1/files.",
    "v1/chat/completions": "Chat completions are not stored; a response of /v1/responses is.",
    "v1/models": _STAYS,
    "vector_stores": "Search is not served; /v1/embeddings and /v1/rerank compute what it needs.",
    "wake_up": _AWAKE,
}
"""A part of another server's route, or two, or its first three; and what to do here."""

_EMBEDDINGS = "It is always on: POST /v1/embeddings."
_FOUND = "It is detected from the chat template; {} sets it."
_GRAMMARS = "It is chosen for each grammar, or by the request."
_KERNELS = "The kernels are chosen for the device."
_METRICS = "It is always on: GET /metrics."
_NEEDLESS = "It is not needed; --adapter-memory is for all adapters together."
_ADAPTERS = "Here it is --adapters NAME=PATH, or --adapters DIR for every sub-folder of a folder."
_ALWAYS = "It is always on."
_PROXY = "Use a proxy in front of the server for this."
_PATH = "The model is the argument before the options: its folder, or its name on the Hub."
_ONE_DEVICE = "All layers are on one device: --device cpu or --device cuda."
_PRIORITIES = "Priorities are always on."
_RANGE = "It is a part of the number: --replicas MIN:MAX."
_REPLICAS = "Here it is --replicas, or --enable-dp-attention for ranks that share experts."
_REVISION = "It is a part of the name: org/name@REVISION."
_TEMPLATE = "Put it into the model's folder, as chat_template.jinja."

_OPTIONS = {
    "--alias": "Here it is --served-model-name.",
    "--allowed-origins": "Here it is --allowed-origin, once for each site.",
    "--attention-backend": _KERNELS,
    "--batch-size": "Here it is --max-batch-tokens.",
    "--cache-type-k": "Here it is --kv-cache-dtype.",
    "--cache-type-v": "Here it is --kv-cache-dtype.",
    "--chat-template": _TEMPLATE,
    "--chat-template-file": _TEMPLATE,
    "--chunked-prefill-size": "Here it is --max-batch-tokens.",
    "--cont-batching": _ALWAYS,
    "--context-length": "Here it is --max-model-len.",
    "--cpu-offload-gb": _ONE_DEVICE,
    "--ctx-size": "Here it is --max-model-len.",
    "--data-parallel-size": _REPLICAS,
    "--disable-cuda-graph": "Here it is --no-cuda-graphs.",
    "--download-dir": "Set HF_HUB_CACHE in the environment.",
    "--dp": _REPLICAS,
    "--dp-size": _REPLICAS,
    "--embedding": _EMBEDDINGS,
    "--embeddings": _EMBEDDINGS,
    "--enable-auto-tool-choice": _FOUND.format("--tool-format"),
    "--enable-chunked-prefill": _ALWAYS,
    "--enable-dbo": "Here it is --enable-two-batch-overlap.",
    "--enable-expert-parallel": "Here it is --expert-parallel-size, with as many groups as ranks.",
    "--enable-lora": f"It is always on; {_ADAPTERS}",
    "--enable-metrics": _METRICS,
    "--enable-prefix-caching": _ALWAYS,
    "--enforce-eager": "Here it is --no-cuda-graphs.",
    "--ep-num-redundant-experts": "Here it is --num-redundant-experts.",
    "--ep-size": "Here it is --expert-parallel-size.",
    "--eplb-config": "Here it is --enable-eplb, and --num-redundant-experts for the number of copies.",
    "--flash-attn": _KERNELS,
    "--gpu-layers": _ONE_DEVICE,
    "--grammar-backend": _GRAMMARS,
    "--guided-decoding-backend": _GRAMMARS,
    "--hf-repo": _PATH,
    "--hf-token": "Set HF_TOKEN in the environment.",
    "--is-embedding": _EMBEDDINGS,
    "--jinja": "The model's chat template is always used.",
    "--lora": _ADAPTERS,
    "--lora-modules": _ADAPTERS,
    "--lora-paths": _ADAPTERS,
    "--max-cpu-loras": _NEEDLESS,
    "--max-lora-rank": _NEEDLESS,
    "--max-loras": _NEEDLESS,
    "--max-loras-per-batch": _NEEDLESS,
    "--max-num-batched-tokens": "Here it is --max-batch-tokens.",
    "--max-num-seqs": "Here it is --max-seqs.",
    "--max-replicas": _RANGE,
    "--max-running-requests": "Here it is --max-seqs.",
    "--max-total-tokens": "Here it is --kv-memory, in bytes.",
    "--mem-fraction-static": "Here it is --kv-memory, in bytes; by default most of the free memory.",
    "--metrics": _METRICS,
    "--model-draft": "Here it is --draft-model, with --speculate auto.",
    "--model-path": _PATH,
    "--n-gpu-layers": _ONE_DEVICE,
    "--parallel": "Here it is --max-seqs.",
    "--pp": "Here it is --pipeline-parallel-size.",
    "--pp-size": "Here it is --pipeline-parallel-size.",
    "--quantization": "Here it is --quantize.",
    "--reasoning-parser": _FOUND.format("--reasoning-format"),
    "--revision": _REVISION,
    "--scale-by-load": _RANGE,
    "--schedule-policy": _PRIORITIES,
    "--scheduling-policy": _PRIORITIES,
    "--speculative-algorithm": "Here it is --speculate.",
    "--speculative-config": "Here it is --speculate, and --draft-model for a draft model, an EAGLE-3 head, "
    "or mtp for the MTP layer of the model itself.",
    "--speculative-draft-model-path": "Here it is --draft-model, with --speculate auto.",
    "--ssl-ca-certs": _PROXY,
    "--ssl-cert-file": "Here it is --ssl-certfile.",
    "--ssl-cert-reqs": _PROXY,
    "--ssl-key-file": "Here it is --ssl-keyfile.",
    "--structured-outputs-config": _GRAMMARS,
    "--threads": "Set OMP_NUM_THREADS in the environment.",
    "--tokenizer": "It is read from the model's folder.",
    "--tool-call-parser": _FOUND.format("--tool-format"),
    "--tp": "Here it is --tensor-parallel-size.",
    "--tp-size": "Here it is --tensor-parallel-size.",
    "--trust-remote-code": "Code from models is never run.",
    "--ubatch-size": "Here it is --max-batch-tokens.",
}
"""An option of another server, or of an earlier version of this one, and what to do here."""

_SHORT = {
    "-a": "--alias",
    "-b": "--batch-size",
    "-c": "--ctx-size",
    "-ctk": "--cache-type-k",
    "-ctv": "--cache-type-v",
    "-dp": "--data-parallel-size",
    "-fa": "--flash-attn",
    "-hf": "--hf-repo",
    "-m": "--model-path",
    "-md": "--model-draft",
    "-ngl": "--n-gpu-layers",
    "-np": "--parallel",
    "-pp": "--pp-size",
    "-q": "--quantization",
    "-t": "--threads",
    "-tp": "--tp-size",
    "-ub": "--ubatch-size",
}
"""The short forms of some of these in vLLM and llama.cpp."""


def field_here(name: str, known: Collection[str]) -> str | None:
    """The name of another server's field in a request with the `known` fields. None if there is none."""
    place = _PLACE.search(name)
    found = _FIELDS.get(_PLACE.sub("[]", name), ())
    here = next((here for here in found if re.split(r"[.\[]", here, maxsplit=1)[0] in known), None)
    return here if here is None or place is None else here.replace("[]", place[0])


def route_here(path: str) -> str | None:
    """A sentence about a route of another server. None if it is not known."""
    parts = [part for part in path.split("/") if part]
    last = parts[-1] if parts else ""
    for part in (*parts, *map("/".join, pairwise(parts)), "/".join(parts[:3])):
        if part in _INSTEAD:
            return _INSTEAD[part]
    if last in _NOT_SERVED:
        return f"{_NOT_SERVED[last]}: this server generates text."
    return f"Here it is {_ROUTES[last]}." if last in _ROUTES else None


def option_here(argument: str) -> str | None:
    """What to do instead of an option of another server, given as the option or as `--name=value`. None if it
    is not known."""
    name = argument.partition("=")[0].replace("_", "-")
    return _OPTIONS.get(_SHORT.get(name, name))
