"""Options of vLLM, on a command line or as `engine_kwargs`: what becomes of each (docs/ray_serve_llm.md)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wingbeat.deployments.options.surface_options import OF_REQUESTS
from wingbeat.deployments.vllm_words.foreign_rows import Given, Row, becomes, left_out, refused, renamed, same
from wingbeat.deployments.vllm_words.speculative_config import SPECULATIVE
from wingbeat.runtime.config import INT8
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.tensor_files import read_fields, text_fields

SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "q": "quantization",
    "sc": "speculative_config",
    "cc": "compilation_config",
    "O": "optimization_level",
}
"""vLLM's short names of options, behind one dash."""
_THOUSANDS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_KERNELS_OF = {"awq_marlin": "awq", "gptq_marlin": "gptq", "gptq_bitblas": "gptq", "cpu_awq": "awq"}
"""vLLM's names of kernels for checkpoints of another name."""


def _number(value: Any) -> Any:
    """vLLM's `32k` (32,000) and `32K` (32,768); `auto` and -1 leave it to the memory."""
    if value in ("auto", -1, "-1"):
        return None
    if isinstance(value, str) and value[-1:] in _THOUSANDS:
        try:
            return int(float(value[:-1]) * _THOUSANDS[value[-1]])
        except ValueError:
            return value
    return value


def _dtype(value: Any) -> Any:
    return {"half": "float16", "float": "float32"}.get(value, value)


def _kv_dtype(value: Any) -> Any:
    return {"fp8_e4m3": "fp8"}.get(value, value)


def _names(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def _adapters(value: Any) -> Any:
    """vLLM's `name=path` or `{"name": ..., "path": ...}`, one or a list of them, by name."""
    entries = value if isinstance(value, list | tuple) else [value]
    found = {}
    for entry in entries:
        read = json.loads(entry) if isinstance(entry, str) and entry.lstrip().startswith("{") else entry
        if isinstance(read, Mapping) and {"name", "path"} <= read.keys():
            found[str(read["name"])] = read["path"]
        elif isinstance(read, Mapping):
            found |= read
        else:
            for pair in str(read).split(","):
                name, sign, folder = pair.strip().partition("=")
                if not (name and sign and folder):
                    raise ValueError(f"{pair!r} must read name=folder")
                found[name] = folder
    return found


def _images(value: Any) -> Any:
    """vLLM's `{"image": {"count": 4, ...}}` as `{"image": 4}`."""
    read = json.loads(value) if isinstance(value, str) else value
    if not isinstance(read, Mapping):
        return read
    return {kind: most.get("count") if isinstance(most, Mapping) else most for kind, most in read.items()}


def _eager(name: str, value: Any, given: Given) -> dict[str, Any]:
    return {"cuda_graphs": False} if value else {}


def _lora(name: str, value: Any, given: Given) -> dict[str, Any]:
    if value and not (given.get("lora_modules") or given.get("lora_update_dir")):
        raise ValueError("give {lora_modules}, or {lora_update_dir} to load adapters later")
    return {}


def _quantization(name: str, value: Any, given: Given) -> dict[str, Any]:
    """What the checkpoint says already may be said again; at load weights are rounded to int8 alone, on CPUs."""
    method, model = _KERNELS_OF.get(str(value), str(value)), given.get("model")
    stored = {}
    if model is not None:
        fields = read_fields(checkpoint_folder(Path(model), with_weights=False) / "config.json")
        stored = fields.get("quantization_config") or text_fields(fields).get("quantization_config") or {}
    if method == INT8 and not stored:
        return {"dtype": INT8}
    if str(stored.get("quant_method", "nothing")).replace("_", "-") != method.replace("_", "-"):
        raise ValueError(
            f"the checkpoint's quantization_config says {stored.get('quant_method', 'nothing')}, and at load weights "
            "are rounded to int8 alone: leave it out, or name a quantised checkpoint"
        )
    return {}


def _of_requests(name: str, value: Any, given: Given) -> dict[str, Any]:
    return {"chat_template": OF_REQUESTS} if value else {}


def _logprobs(name: str, value: Any, given: Given) -> dict[str, Any]:
    if isinstance(value, int) and 0 <= value <= 20:
        return {}
    raise ValueError("20 at most; leave it out")


def _tokenizer(name: str, value: Any, given: Given) -> dict[str, Any]:
    if value != given.get("model"):
        raise ValueError("put its files into the model's folder")
    return {}


_GRAPH_MODES: dict[str, dict[str, Any]] = {
    "NONE": {"cuda_graphs": "none"},
    "FULL_DECODE_ONLY": {"cuda_graphs": "decode_only"},
    "FULL": {"cuda_graphs": "full"},
    "FULL_AND_PIECEWISE": {"cuda_graphs": "full"},
}
"""What vLLM captures, and what we are then given: rounds are captured whole, those of prompts too."""


def _compiled(name: str, value: Any, given: Given) -> dict[str, Any]:
    """vLLM's level, alone or in an object that names what is captured too.

    A level changes no text, and needs nothing here: layers have kernels of their own and are not compiled.
    """
    read = json.loads(value) if isinstance(value, str) else value
    read = read if isinstance(read, Mapping) else {"level": read}
    if not set(read) <= {"level", "mode", "cudagraph_mode"} or read.get("level", read.get("mode", 0)) not in range(4):
        raise ValueError("layers are not compiled: a level from 0 to 3 is passed over, and {cuda_graphs} says the rest")
    if "cudagraph_mode" not in read:
        return {}
    mode = str(read["cudagraph_mode"]).upper()
    if mode not in _GRAPH_MODES:
        raise ValueError(f"nothing is captured in pieces: cudagraph_mode is one of {', '.join(_GRAPH_MODES)}")
    return _GRAPH_MODES[mode]


_REPLICAS = refused("use {num_replicas}", 1, "1", "auto")
_ONE_NODE = left_out("a verifier's ranks are processes of one node, which Ray places")
_ONLY_TENSORS = refused("use {tensor_parallel_size}", 1)
_HTTPS = refused("serve behind a proxy that speaks HTTPS")
_DRAFTED = refused("write speculative_config, or {drafter} and {draft_steps}")
_LLGUIDANCE = left_out("grammars are llguidance's")
_FILES = refused("a model is the files in its folder", "auto")
_OFFLOADED = refused("weights and KV stay on one device; {tensor_parallel_size} takes several", 0, 0.0)
_KERNELS = left_out("each device has its kernels; {kernels} torch takes torch's")
_FIGURES = left_out("figures are at /metrics, and not logged", flag=True)
_ACCESS = left_out("requests are logged with {access_log} alone", flag=True)
_GENERATES = refused("models generate, and {embeddings} has them embed too", "auto", "generate", "none")
_HTTP = refused("an option of `wingbeat serve`; of a YAML, http_options")
_AUTO_TOOLS = left_out("{tool_call_parser} is enough", True, otherwise="turn {tool_call_parser} to none", flag=True)
_OWN_CODE = refused("code of yours is {drafter}, {tool_call_parser} and {reasoning_parser}, by their import paths")

VLLM: dict[str, Row] = SPECULATIVE | {
    # The model and its files.
    "model": same(),
    "served_model_name": same(_names, "the same; several names too"),
    "dtype": same(_dtype, "the same; half is float16, float is float32"),
    "max_model_len": same(_number, "the same, 32k too; auto and -1 leave it out"),
    "quantization": becomes(
        "left out where config.json says the same; `int8` is {dtype} int8, on CPUs; else refused", _quantization
    ),
    "seed": left_out("a request gives its own `seed`"),
    "tokenizer": becomes(
        "left out where it is the model; else refused: its files go into the model's folder", _tokenizer
    ),
    "tokenizer_mode": left_out("the model's folder says it", "auto", "hf", "fast", otherwise="only `auto` is read"),
    "tokenizer_revision": refused("write org/name@revision as the model"),
    "skip_tokenizer_init": refused("requests are texts, too", flag=True),
    "revision": refused("write org/name@revision as the model"),
    "code_revision": refused("code of a checkpoint is never run"),
    "trust_remote_code": refused("code of a checkpoint is never run; leave it out", flag=True),
    "hf_token": refused("set HF_TOKEN in the environment"),
    "hf_config_path": _FILES,
    "hf_overrides": refused("change config.json in a copy of the model's folder", {}, "{}"),
    "config_format": _FILES,
    "rope_scaling": refused("change config.json in a copy of the model's folder"),
    "rope_theta": refused("change config.json in a copy of the model's folder"),
    "download_dir": refused("set HF_HOME in the environment"),
    "load_format": left_out("the files say what they are", "auto", "safetensors", "hf", otherwise="give a folder"),
    "model_loader_extra_config": refused("give a folder", {}, "{}"),
    "safetensors_load_strategy": left_out("weights are read as the device needs them"),
    "use_tqdm_on_load": left_out("a start says what it does", flag=True),
    "ignore_patterns": left_out("only the files that a checkpoint needs are fetched"),
    "model_impl": left_out("modeling code is transformers'", "auto", "transformers", otherwise="leave it out"),
    "runner": _GENERATES,
    "convert": _GENERATES,
    "task": _GENERATES,
    "generation_config": left_out("ends of text are read from it; requests say how to sample"),
    "override_generation_config": refused("give `temperature`, `top_p` and so on in requests", {}, "{}"),
    "disable_sliding_window": refused("windows are the model's", flag=True),
    "enable_prompt_embeds": refused("prompts are texts, tokens and images", flag=True),
    "enable_sleep_mode": becomes(
        "{rollouts}", lambda name, value, given: {"rollouts": True} if value else {}, flag=True
    ),
    "weight_transfer_config": same(),
    "max_logprobs": becomes("left out up to 20; more are refused", _logprobs),
    "logprobs_mode": left_out("the model's own, before all processors", "raw_logprobs", otherwise="only raw_logprobs"),
    "logits_processors": _OWN_CODE,
    # What an engine holds and runs.
    "device": same(),
    "block_size": same(),
    "gpu_memory_utilization": same(),
    "kv_cache_memory_bytes": same(_number),
    "kv_cache_dtype": same(_kv_dtype, "the same: auto and fp8, which is fp8_e4m3"),
    "calculate_kv_scales": refused("KV in fp8 has a scale of 1", flag=True),
    "enable_prefix_caching": same(),
    "prefix_caching_hash_algo": left_out("a block's hash covers all before it"),
    "num_gpu_blocks_override": renamed("num_kv_blocks"),
    "max_num_seqs": same(_number),
    "max_num_batched_tokens": same(_number),
    "enable_chunked_prefill": left_out(
        "long prompts run in chunks", True, otherwise="long prompts always do", flag=True
    ),
    "long_prefill_token_threshold": refused("use {max_num_batched_tokens}", 0),
    "max_num_partial_prefills": left_out("chunks of several prompts share a round"),
    "max_long_partial_prefills": left_out("chunks of several prompts share a round"),
    "scheduling_policy": left_out("the `priority` of requests always counts"),
    "async_scheduling": left_out("on GPUs the host always runs one round behind the device", flag=True),
    "stream_interval": left_out("{stream_interval_ms} bounds how often texts are sent"),
    "num_lookahead_slots": renamed("draft_steps"),
    "swap_space": left_out("nothing is swapped"),
    "cpu_offload_gb": _OFFLOADED,
    "kv_offloading_size": _OFFLOADED,
    "kv_offloading_backend": left_out("KV stays on its device"),
    "kv_transfer_config": refused("prompts and answers run in one engine; leave it out"),
    "kv_events_config": refused("routers know what is cached by the streams of the engines; leave it out"),
    "enforce_eager": becomes("{cuda_graphs} off", _eager, flag=True),
    "compilation_config": becomes(
        "a level from 0 to 3 is left out; a `cudagraph_mode` of FULL, FULL_AND_PIECEWISE, FULL_DECODE_ONLY or NONE is "
        "{cuda_graphs}; else refused",
        _compiled,
    ),
    "optimization_level": left_out("layers have kernels of their own and are not compiled", 0, 1, 2, 3),
    "cuda_graph_sizes": left_out("sizes follow {max_num_seqs}"),
    "max_seq_len_to_capture": left_out("graphs have no length"),
    "attention_backend": _KERNELS,
    "attention_config": _KERNELS,
    "moe_backend": _KERNELS,
    "disable_cascade_attn": left_out("no cascade is run", flag=True),
    "disable_custom_all_reduce": left_out("sums of ranks are torch's", flag=True),
    "mamba_cache_dtype": left_out("states have the model's dtype", "auto", otherwise="leave it out"),
    "mamba_ssm_cache_dtype": left_out("states have the model's dtype", "auto", otherwise="leave it out"),
    "additional_config": refused("there is no plugin to read it", {}, "{}"),
    # Several devices and processes.
    "tensor_parallel_size": same(),
    "pipeline_parallel_size": _ONLY_TENSORS,
    "decode_context_parallel_size": _ONLY_TENSORS,
    "prefill_context_parallel_size": _ONLY_TENSORS,
    "data_parallel_size": _REPLICAS,
    "data_parallel_size_local": _REPLICAS,
    "data_parallel_backend": left_out("replicas are Ray's"),
    "api_server_count": renamed("num_router_replicas"),
    "enable_expert_parallel": left_out("{tensor_parallel_size} divides experts too", flag=True),
    "enable_eplb": refused("experts stay where they are; leave it out", flag=True),
    "distributed_executor_backend": left_out("it is Ray"),
    "nnodes": refused("a verifier's ranks are processes of one node", 1),
    "node_rank": _ONE_NODE,
    "master_addr": _ONE_NODE,
    "master_port": _ONE_NODE,
    "max_parallel_loading_workers": left_out("ranks read their parts at once"),
    "ray_workers_use_nsight": refused("/trace shows rounds; leave it out", flag=True),
    "worker_cls": refused("leave it out", "auto"),
    "worker_extension_cls": refused("leave it out", ""),
    # Adapters and images.
    "enable_lora": becomes("left out beside {lora_modules} or {lora_update_dir}; alone refused", _lora, flag=True),
    "lora_modules": same(_adapters, "the same: name=folder or JSON objects, one or several"),
    "max_loras": same(),
    "max_lora_rank": same(),
    "max_cpu_loras": left_out("files of adapters are read again when needed"),
    "lora_dtype": left_out("an adapter has the model's dtype", "auto", otherwise="leave it out"),
    "fully_sharded_loras": left_out("an adapter is held whole", flag=True),
    "limit_mm_per_prompt": same(_images),
    "mm_processor_kwargs": refused("change preprocessor_config.json in a copy of the model's folder", {}, "{}"),
    "mm_processor_cache_gb": left_out("{max_media_memory_bytes} bounds all images and audio"),
    "allowed_media_domains": same(),
    "allowed_local_media_path": refused("send data URLs; files of the server are not read", ""),
    # Tools, thoughts, grammars, templates.
    "tool_call_parser": same(),
    "reasoning_parser": same(),
    "enable_auto_tool_choice": _AUTO_TOOLS,
    "enable_reasoning": left_out("{reasoning_parser} is enough", flag=True),
    "tool_parser_plugin": refused("{tool_call_parser} takes module:Class"),
    "reasoning_parser_plugin": refused("{reasoning_parser} takes module:Class"),
    "tool_server": refused("clients run their tools"),
    "exclude_tools_when_tool_choice_none": left_out("the template gets the tools that a request has", flag=True),
    "guided_decoding_backend": _LLGUIDANCE,
    "structured_outputs_config": _LLGUIDANCE,
    "chat_template": same(says="the same: a file"),
    "trust_request_chat_template": becomes("{chat_template} request", _of_requests, flag=True),
    "chat_template_content_format": left_out("templates of models that take images get parts, others texts"),
    "default_chat_template_kwargs": refused("give `chat_template_kwargs` in requests", {}, "{}"),
    "response_role": left_out("answers are the assistant's", "assistant", otherwise="leave it out"),
    # HTTP.
    "host": _HTTP,
    "port": _HTTP,
    "uds": refused("serve on an address"),
    "root_path": refused("serve behind a proxy that takes the prefix off; of a YAML, route_prefix"),
    "api_key": same(),
    "allowed_origins": same(),
    "allow_credentials": left_out("a key is a header that a page sends itself", flag=True),
    "allowed_methods": left_out("pages may use each method there is"),
    "allowed_headers": left_out("pages may send each header that is read"),
    "ssl_certfile": _HTTPS,
    "ssl_keyfile": _HTTPS,
    "ssl_ca_certs": _HTTPS,
    "middleware": refused("serve behind a proxy"),
    "enable_request_id_headers": left_out("X-Request-Id is always answered", flag=True),
    "enable_prompt_tokens_details": left_out("usage always tells cached tokens", flag=True),
    "enable_force_include_usage": refused("a request asks by stream_options.include_usage", flag=True),
    "enable_server_load_tracking": left_out("/load is always there", flag=True),
    "enable_tokenizer_info_endpoint": left_out("/tokenizer_info is always there", flag=True),
    "return_tokens_as_token_ids": refused("a request asks by return_tokens_as_token_ids", flag=True),
    "disable_frontend_multiprocessing": left_out("routers are processes of their own", flag=True),
    "disable_fastapi_docs": refused("/docs is always there", flag=True),
    "headless": refused("`ray start` makes a node of a machine", flag=True),
    "config": refused("`serve run FILE.yaml` has settings as `args`"),
    "otlp_traces_endpoint": same(),
    "collect_detailed_traces": left_out("/trace shows every round"),
    "show_hidden_metrics_for_version": left_out("/metrics has all there are"),
    "disable_log_stats": _FIGURES,
    "aggregate_engine_logging": _FIGURES,
    "disable_log_requests": _ACCESS,
    "enable_log_requests": becomes("{access_log}", lambda name, value, given: {"access_log": bool(value)}, flag=True),
    "disable_uvicorn_access_log": _ACCESS,
    "uvicorn_log_level": left_out("{access_log} logs requests"),
    "enable_log_outputs": refused("texts are not logged", flag=True),
    "max_log_len": left_out("prompts are not logged"),
    "log_config_file": refused("lines go to stderr and to Ray's logs"),
    # Options of vLLM's own past.
    "speculative_model": _DRAFTED,
    "num_speculative_tokens": _DRAFTED,
    "use_v2_block_manager": left_out("blocks have one manager", flag=True),
    "num_scheduler_steps": left_out("the engine's thread runs round after round"),
    "preemption_mode": left_out("a sequence that gives way is computed again"),
}
"""By option: what becomes of it."""
