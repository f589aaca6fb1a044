"""Options of vLLM, as given on a command line or in `engine_kwargs`, and the handling of each option
(docs/ray_serve_llm.md).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wingbeat.deployments.options.surface_options import OF_REQUESTS
from wingbeat.deployments.vllm_words.foreign_rows import Given, Row, Settings, becomes, left_out, refused, renamed, same
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
"""vLLM's short names of options, written after one dash."""
_THOUSANDS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_KERNELS_OF = {"awq_marlin": "awq", "gptq_marlin": "gptq", "gptq_bitblas": "gptq", "cpu_awq": "awq"}
"""Quantization method of the checkpoints that a kernel of vLLM runs, by vLLM's name of the kernel."""


def _number(value: Any) -> Any:
    """Reads a number in one of vLLM's notations, such as `32k` (32,000) and `32K` (32,768).

    Returns None for `auto` and -1; the default then applies.
    """
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
    """Reads one adapter or a list of adapters, each `name=path` or `{"name": ..., "path": ...}`; returns folders by
    name.
    """
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
                    raise ValueError("must read name=folder")
                found[name] = folder
    return found


def _images(value: Any) -> Any:
    """Converts vLLM's `{"image": {"count": 4, ...}}` to `{"image": 4}`."""
    read = json.loads(value) if isinstance(value, str) else value
    if not isinstance(read, Mapping):
        return read
    return {kind: most.get("count") if isinstance(most, Mapping) else most for kind, most in read.items()}


def _eager(value: Any, given: Given) -> Settings:
    return {"cuda_graphs": False} if value else {}


def _lora(value: Any, given: Given) -> Settings:
    if value and not (given.get("lora_modules") or given.get("lora_update_dir")):
        raise ValueError("give {lora_modules}, or {lora_update_dir} to load adapters later")
    return {}


def _quantization(value: Any, given: Given) -> Settings:
    """Accepts the quantization method that the checkpoint's config.json names, and int8, because weights can be rounded
    to int8 when they are loaded.
    """
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
            "can be rounded to int8 only: leave it out, or give a quantised checkpoint"
        )
    return {}


def _of_requests(value: Any, given: Given) -> Settings:
    return {"chat_template": OF_REQUESTS} if value else {}


def _logprobs(value: Any, given: Given) -> Settings:
    if isinstance(value, int) and 0 <= value <= 20:
        return {}
    raise ValueError("must be at most 20; leave it out")


def _tokenizer(value: Any, given: Given) -> Settings:
    if value != given.get("model"):
        raise ValueError("put its files into the model's folder")
    return {}


_GRAPH_MODES: dict[str, dict[str, Any]] = {
    "NONE": {"cuda_graphs": "none"},
    "FULL_DECODE_ONLY": {"cuda_graphs": "decode_only"},
    "FULL": {"cuda_graphs": "full"},
    "FULL_AND_PIECEWISE": {"cuda_graphs": "full"},
}
"""For each value of vLLM's `cudagraph_mode`, the setting `cuda_graphs`. Wingbeat captures whole rounds including
prefill, never pieces of rounds.
"""


def _compiled(value: Any, given: Given) -> Settings:
    """Reads a compilation level, or an object with a level and a `cudagraph_mode`.

    A level is ignored, because layers have their own kernels and are not compiled.
    """
    read = json.loads(value) if isinstance(value, str) else value
    read = read if isinstance(read, Mapping) else {"level": read}
    if not set(read) <= {"level", "mode", "cudagraph_mode"} or read.get("level", read.get("mode", 0)) not in range(4):
        raise ValueError(
            "layers are not compiled: a level from 0 to 3 is passed over, cudagraph_mode is {cuda_graphs}, "
            "and other fields are refused"
        )
    if "cudagraph_mode" not in read:
        return {}
    mode = str(read["cudagraph_mode"]).upper()
    if mode not in _GRAPH_MODES:
        raise ValueError(
            f"CUDA graphs are not captured in pieces: cudagraph_mode must be one of {', '.join(_GRAPH_MODES)}"
        )
    return _GRAPH_MODES[mode]


_REPLICAS = refused("use {num_replicas}", 1, "1", "auto")
_ONE_NODE = left_out("a verifier's ranks are processes of one node, which Ray places")
_ONLY_TENSORS = refused("use {tensor_parallel_size}", 1)
_HTTPS = refused("serve behind a proxy that speaks HTTPS")
_DRAFTED = refused("write speculative_config, or {drafter} and {draft_steps}")
_LLGUIDANCE = left_out("grammars are always llguidance's")
_FILES = refused("the configuration is always config.json in the model's folder: leave it out", "auto")
_OFFLOADED = refused(
    "weights and KV cache are never offloaded; {tensor_parallel_size} divides them among several GPUs", 0, 0.0
)
_KERNELS = left_out("the device decides the kernels; {kernels} torch uses PyTorch's")
_FIGURES = left_out("metrics are served at /metrics and are not logged", flag=True)
_ACCESS = left_out("requests are logged only with {access_log}", flag=True)
_GENERATES = refused("models always generate text; {embeddings} serves embeddings too", "auto", "generate", "none")
_HTTP = refused("give it to `wingbeat serve`, or as http_options in YAML")
_AUTO_TOOLS = left_out(
    "{tool_call_parser} alone enables tool calls", True, otherwise="set {tool_call_parser} to none", flag=True
)
_OWN_CODE = refused("own code can be given as {drafter}, {tool_call_parser} and {reasoning_parser}, by import path")

VLLM: dict[str, Row] = SPECULATIVE | {
    # The model and its files.
    "model": same(),
    "served_model_name": same(_names, "the same; several names too"),
    "dtype": same(_dtype, "the same; half is float16, float is float32"),
    "max_model_len": same(_number, "the same; 32k is 32,000; auto and -1 mean the default"),
    "quantization": becomes(
        "left out where config.json says the same; `int8` is {dtype} int8, on CPUs; else refused", _quantization
    ),
    "seed": left_out("a request gives its own `seed`"),
    "tokenizer": becomes(
        "left out where it is the model; else refused: its files go into the model's folder", _tokenizer
    ),
    "tokenizer_mode": left_out(
        "the model's folder decides", "auto", "hf", "fast", otherwise="only auto, hf and fast are supported"
    ),
    "tokenizer_revision": refused("write org/name@revision as the model"),
    "skip_tokenizer_init": refused("requests with text need the tokenizer", flag=True),
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
    "load_format": left_out(
        "the format is detected from the files",
        "auto",
        "safetensors",
        "hf",
        otherwise="only auto, safetensors and hf are supported",
    ),
    "model_loader_extra_config": refused("loaders have no options: leave it out", {}, "{}"),
    "safetensors_load_strategy": left_out("weights are read as the device needs them"),
    "use_tqdm_on_load": left_out("a start always reports its progress", flag=True),
    "ignore_patterns": left_out("only the files that a checkpoint needs are fetched"),
    "model_impl": left_out("transformers has the modeling code", "auto", "transformers", otherwise="leave it out"),
    "runner": _GENERATES,
    "convert": _GENERATES,
    "task": _GENERATES,
    "generation_config": left_out("only its end-of-text tokens are read; requests give sampling parameters"),
    "override_generation_config": refused("give `temperature`, `top_p` and so on in requests", {}, "{}"),
    "disable_sliding_window": refused("the model's config.json decides its sliding window; leave it out", flag=True),
    "enable_prompt_embeds": refused("a prompt is text, token ids, images or audio", flag=True),
    "enable_sleep_mode": becomes("{rollouts}", lambda value, given: {"rollouts": True} if value else {}, flag=True),
    "weight_transfer_config": same(),
    "max_logprobs": becomes("left out up to 20; more are refused", _logprobs),
    "logprobs_mode": left_out(
        "log-probabilities are those of the model's logits", "raw_logprobs", otherwise="only raw_logprobs is supported"
    ),
    "logits_processors": _OWN_CODE,
    # The engine: memory, scheduling and kernels.
    "device": same(),
    "block_size": same(),
    "gpu_memory_utilization": same(),
    "kv_cache_memory_bytes": same(_number),
    "kv_cache_dtype": same(_kv_dtype, "the same: auto and fp8, which is fp8_e4m3"),
    "calculate_kv_scales": refused("the scale of a KV cache in fp8 is always 1", flag=True),
    "enable_prefix_caching": same(),
    "prefix_caching_hash_algo": left_out("blocks are identified by all tokens up to their end"),
    "num_gpu_blocks_override": renamed("num_kv_blocks"),
    "max_num_seqs": same(_number),
    "max_num_batched_tokens": same(_number),
    "enable_chunked_prefill": left_out(
        "long prompts are prefilled in chunks", True, otherwise="long prompts are always prefilled in chunks", flag=True
    ),
    "long_prefill_token_threshold": refused("use {max_num_batched_tokens}", 0),
    "max_num_partial_prefills": left_out("chunks of several prompts share a round"),
    "max_long_partial_prefills": left_out("chunks of several prompts share a round"),
    "scheduling_policy": left_out("the `priority` of requests always counts"),
    "async_scheduling": left_out("on GPUs the host always runs one round behind the device", flag=True),
    "stream_interval": left_out("{stream_interval_ms} bounds how often a stream sends text"),
    "num_lookahead_slots": renamed("draft_steps"),
    "swap_space": left_out("KV is never swapped to host memory: preempted sequences are recomputed"),
    "cpu_offload_gb": _OFFLOADED,
    "kv_offloading_size": _OFFLOADED,
    "kv_offloading_backend": left_out("the KV cache stays on its device"),
    "kv_transfer_config": refused("prefill and decode run in the same engine; leave it out"),
    "kv_events_config": refused("engines report cached prefixes to routers by themselves; leave it out"),
    "enforce_eager": becomes("{cuda_graphs} none", _eager, flag=True),
    "compilation_config": becomes(
        "a level from 0 to 3 is left out; a `cudagraph_mode` of FULL, FULL_AND_PIECEWISE, FULL_DECODE_ONLY or NONE is "
        "{cuda_graphs}; else refused",
        _compiled,
    ),
    "optimization_level": left_out("layers have their own kernels and are not compiled", 0, 1, 2, 3),
    "cuda_graph_sizes": left_out("captured batch sizes follow from {max_num_seqs}"),
    "max_seq_len_to_capture": left_out("a captured CUDA graph fits every sequence length"),
    "attention_backend": _KERNELS,
    "attention_config": _KERNELS,
    "moe_backend": _KERNELS,
    "disable_cascade_attn": left_out("cascade attention is never used", flag=True),
    "disable_custom_all_reduce": left_out("all-reduce is always PyTorch's", flag=True),
    "mamba_cache_dtype": left_out("recurrent states have the model's dtype", "auto", otherwise="leave it out"),
    "mamba_ssm_cache_dtype": left_out("recurrent states have the model's dtype", "auto", otherwise="leave it out"),
    "additional_config": refused("no plugin reads it", {}, "{}"),
    # Several devices and processes.
    "tensor_parallel_size": same(),
    "pipeline_parallel_size": _ONLY_TENSORS,
    "decode_context_parallel_size": _ONLY_TENSORS,
    "prefill_context_parallel_size": _ONLY_TENSORS,
    "data_parallel_size": _REPLICAS,
    "data_parallel_size_local": _REPLICAS,
    "data_parallel_backend": left_out("Ray runs the replicas"),
    "api_server_count": renamed("num_router_replicas"),
    "enable_expert_parallel": left_out("{tensor_parallel_size} also divides experts", flag=True),
    "enable_eplb": refused("experts are never moved between ranks; leave it out", flag=True),
    "distributed_executor_backend": left_out("the backend is always Ray"),
    "nnodes": refused("a verifier's ranks are processes of one node", 1),
    "node_rank": _ONE_NODE,
    "master_addr": _ONE_NODE,
    "master_port": _ONE_NODE,
    "max_parallel_loading_workers": left_out("all ranks load their parts at the same time"),
    "ray_workers_use_nsight": refused("/trace shows the timings of rounds; leave it out", flag=True),
    "worker_cls": refused("workers are Wingbeat's own; leave it out", "auto"),
    "worker_extension_cls": refused("workers are Wingbeat's own; leave it out", ""),
    # Adapters and images.
    "enable_lora": becomes("left out beside {lora_modules} or {lora_update_dir}; alone refused", _lora, flag=True),
    "lora_modules": same(_adapters, "the same: name=folder or JSON objects, one or several"),
    "max_loras": same(),
    "max_lora_rank": same(),
    "max_cpu_loras": left_out("files of adapters are read again when needed"),
    "lora_dtype": left_out("an adapter has the model's dtype", "auto", otherwise="leave it out"),
    "fully_sharded_loras": left_out("adapters are not divided among ranks", flag=True),
    "limit_mm_per_prompt": same(_images),
    "mm_processor_kwargs": refused("change preprocessor_config.json in a copy of the model's folder", {}, "{}"),
    "mm_processor_cache_gb": left_out("{max_media_memory_bytes} bounds the memory of images and audio"),
    "allowed_media_domains": same(),
    "allowed_local_media_path": refused("send data URLs; files of the server are not read", ""),
    # Tools, reasoning, grammars, templates.
    "tool_call_parser": same(),
    "reasoning_parser": same(),
    "enable_auto_tool_choice": _AUTO_TOOLS,
    "enable_reasoning": left_out("{reasoning_parser} alone enables reasoning", flag=True),
    "tool_parser_plugin": refused("{tool_call_parser} accepts module:Class"),
    "reasoning_parser_plugin": refused("{reasoning_parser} accepts module:Class"),
    "tool_server": refused("clients run the tools, the server runs none"),
    "exclude_tools_when_tool_choice_none": left_out("the template always gets the request's tools", flag=True),
    "guided_decoding_backend": _LLGUIDANCE,
    "structured_outputs_config": _LLGUIDANCE,
    "chat_template": same(says="the same: a file"),
    "trust_request_chat_template": becomes("{chat_template} request", _of_requests, flag=True),
    "chat_template_content_format": left_out("templates of models that take images get content parts, others get text"),
    "default_chat_template_kwargs": refused("give `chat_template_kwargs` in requests", {}, "{}"),
    "response_role": left_out("the role of an answer is assistant", "assistant", otherwise="leave it out"),
    # HTTP.
    "host": _HTTP,
    "port": _HTTP,
    "uds": refused("Unix sockets are not supported; give --host and --port"),
    "root_path": refused("serve behind a proxy that removes the prefix, or give route_prefix in YAML"),
    "api_key": same(),
    "allowed_origins": same(),
    "allow_credentials": left_out("pages send the API key in a header and use no cookies", flag=True),
    "allowed_methods": left_out("pages may use every method that is served"),
    "allowed_headers": left_out("pages may send every header that is read"),
    "ssl_certfile": _HTTPS,
    "ssl_keyfile": _HTTPS,
    "ssl_ca_certs": _HTTPS,
    "middleware": refused("serve behind a proxy"),
    "enable_request_id_headers": left_out("every answer has X-Request-Id", flag=True),
    "enable_prompt_tokens_details": left_out("usage always reports cached tokens", flag=True),
    "enable_force_include_usage": refused("a request sets stream_options.include_usage", flag=True),
    "enable_server_load_tracking": left_out("/load is always served", flag=True),
    "enable_tokenizer_info_endpoint": left_out("/tokenizer_info is always served", flag=True),
    "return_tokens_as_token_ids": refused("a request sets return_tokens_as_token_ids", flag=True),
    "disable_frontend_multiprocessing": left_out("each router is a process of its own", flag=True),
    "disable_fastapi_docs": refused("/docs is always served", flag=True),
    "headless": refused("`ray start` adds a machine to the cluster", flag=True),
    "config": refused("`serve run FILE.yaml` reads settings from `args` in the file"),
    "otlp_traces_endpoint": same(),
    "collect_detailed_traces": left_out("/trace shows every round"),
    "show_hidden_metrics_for_version": left_out("/metrics always has all metrics"),
    "disable_log_stats": _FIGURES,
    "aggregate_engine_logging": _FIGURES,
    "disable_log_requests": _ACCESS,
    "enable_log_requests": becomes("{access_log}", lambda value, given: {"access_log": bool(value)}, flag=True),
    "disable_uvicorn_access_log": _ACCESS,
    "uvicorn_log_level": left_out("{access_log} decides whether requests are logged"),
    "enable_log_outputs": refused("texts are not logged", flag=True),
    "max_log_len": left_out("prompts are not logged"),
    "log_config_file": refused("logs go to stderr and to Ray's log files"),
    # Options that only earlier versions of vLLM have.
    "speculative_model": _DRAFTED,
    "num_speculative_tokens": _DRAFTED,
    "use_v2_block_manager": left_out("there is one block manager", flag=True),
    "num_scheduler_steps": left_out("the scheduler runs before every round"),
    "preemption_mode": left_out("preempted sequences are recomputed"),
}
"""Handling of each option, by name."""
