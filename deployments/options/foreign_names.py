"""Options of other servers that have another name here, or none, and settings of old: what to write instead."""

from collections.abc import Callable

NOT_NEEDED = "leave it out: "
_HINTS = {
    "api_server_count": "use {num_router_replicas}",
    "async_scheduling": NOT_NEEDED + "on GPUs the host always runs one round behind the device",
    "chat_template": "put the template into the model's folder as chat_template.jinja",
    "chat_template_content_format": NOT_NEEDED + "templates of models that take images get parts, others texts",
    "compilation_config": "use {compile} and {cuda_graphs}",
    "config": "use `serve run FILE.yaml`, whose `args` are these settings",
    "context_length": "use {max_model_len}",
    "cpu_offload_gb": "weights stay on one device; use {tensor_parallel_size} for several",
    "data_parallel_size": "use {num_replicas}",
    "disable_log_requests": NOT_NEEDED + "requests are logged with {access_log} alone",
    "disable_log_stats": NOT_NEEDED + "figures are at /metrics, and not logged",
    "distributed_executor_backend": NOT_NEEDED + "it is Ray",
    "download_dir": "set HF_HOME in the environment",
    "enable_auto_tool_choice": NOT_NEEDED + "{tool_call_parser} is enough",
    "enable_chunked_prefill": NOT_NEEDED + "long prompts always run in chunks, of {max_num_batched_tokens} at most",
    "enable_deterministic_inference": "use {deterministic}",
    "enable_expert_parallel": "use {tensor_parallel_size}, which divides experts too",
    "enable_log_requests": "use {access_log}",
    "enable_lora": NOT_NEEDED + "{lora_modules} is enough, or {lora_update_dir} to load adapters later",
    "enable_prompt_tokens_details": NOT_NEEDED + "usage always tells cached tokens",
    "enable_reasoning": "use {reasoning_parser}",
    "enable_server_load_tracking": NOT_NEEDED + "/load is always there",
    "enforce_eager": "turn {cuda_graphs} off",
    "fully_sharded_loras": NOT_NEEDED + "an adapter is held whole",
    "generation_config": NOT_NEEDED + "of generation_config.json the ends of text are read; requests say how to sample",
    "guided_decoding_backend": NOT_NEEDED + "it is xgrammar",
    "hf_overrides": "change config.json in a copy of the model's folder",
    "hf_token": "set HF_TOKEN in the environment",
    "load_format": NOT_NEEDED + "the files say what they are",
    "long_prefill_token_threshold": "use {max_num_batched_tokens}",
    "max_cpu_loras": "use {max_loras}",
    "max_logprobs": NOT_NEEDED + "20 at most",
    "max_running_requests": "use {max_num_seqs}",
    "mem_fraction_static": "use {gpu_memory_utilization}",
    "model_path": "use {model}",
    "num_gpu_blocks_override": "use {num_kv_blocks}",
    "num_lookahead_slots": "use {draft_steps}",
    "num_speculative_tokens": "use {draft_steps}",
    "override_generation_config": "give `temperature`, `top_p` and so on in requests",
    "pipeline_parallel_size": "use {tensor_parallel_size}",
    "quantization": NOT_NEEDED + "quantization_config of the model's config.json says it",
    "reasoning_parser_plugin": "{reasoning_parser} takes module:Class",
    "revision": "write org/name@revision as the model",
    "root_path": "serve behind a proxy that takes the prefix off",
    "scheduling_policy": NOT_NEEDED + "the `priority` of requests always counts",
    "seed": "requests have a `seed`",
    "speculative_algorithm": "name the drafter: DRAFTER after MODEL, or {drafter}",
    "speculative_config": "name the drafter: DRAFTER after MODEL, or {drafter}; {draft_steps} is its number of tokens",
    "speculative_draft_model_path": "name the drafter: DRAFTER after MODEL, or {drafter}",
    "speculative_eagle_topk": "use {draft_top_k}",
    "speculative_model": "name the drafter: DRAFTER after MODEL, or {drafter}",
    "speculative_num_draft_tokens": "use {verify_tree_size}",
    "speculative_num_steps": "use {draft_steps}",
    "ssl_certfile": "serve behind a proxy that speaks HTTPS",
    "ssl_keyfile": "serve behind a proxy that speaks HTTPS",
    "structured_outputs_config": NOT_NEEDED + "it is xgrammar",
    "swap_space": NOT_NEEDED + "nothing is swapped",
    "task": NOT_NEEDED + "models generate",
    "tokenizer": "put its files into the model's folder",
    "tokenizer_mode": NOT_NEEDED + "the model's folder says it",
    "tool_parser_plugin": "{tool_call_parser} takes module:Class",
    "tp_size": "use {tensor_parallel_size}",
    "trust_remote_code": NOT_NEEDED + "code of a checkpoint is never run",
    "uvicorn_log_level": NOT_NEEDED + "{access_log} logs requests",
}
"""Options of vLLM and SGLang, with underscores; what stands in braces is a setting of ours."""

DROPPED = {
    "cpu_memory_utilization": "use {kv_cache_memory_bytes}; without it KV takes a quarter of the free RAM",
    "max_image_bytes": NOT_NEEDED + "an image has 16 MiB at most; {max_media_memory_bytes} bounds all of them",
    "max_image_memory_bytes": "use {max_media_memory_bytes}, which counts audio too",
    "max_image_pixels": NOT_NEEDED + "an image has 25,000,000 pixels at most; {max_media_memory_bytes} bounds all",
    "media_timeout_s": NOT_NEEDED + "an image is fetched within 5 s, redirects included",
    "num_cpus_per_drafter": NOT_NEEDED + "it is 0.3; {drafter_resources} says which nodes drafters may run on",
    "num_cpus_per_router": NOT_NEEDED + "it is 0.1",
    "overlap": NOT_NEEDED + "on GPUs the host always runs one round behind the device, with the same tokens",
    "share_core": NOT_NEEDED + "with {threads} 1 on CPUs, verifier and drafter share a core where one can be spared",
    "state_interval": NOT_NEEDED + "recurrent states are kept every 256 tokens",
    "target_queue_s": "it is 2 s; for another, {autoscaling_config} takes policy.policy_kwargs.target_queue_s",
}
"""Settings that Wingbeat once had; in braces, those that are left."""


class _Written(dict[str, str]):
    def __init__(self, write: Callable[[str], str]) -> None:
        self._write = write

    def __missing__(self, name: str) -> str:
        return self._write(name)


def hint(option: str, write: Callable[[str], str] = str) -> str | None:
    """What to use in the place of an option that is not here, `--max-cpu-loras` or `max_cpu_loras`; None if unknown.

    Args:
        write: from a setting's name to how it is written where the option was.
    """
    name = option.partition("=")[0].removeprefix("--no-").removeprefix("--").replace("-", "_")
    found = _HINTS.get(name, DROPPED.get(name))
    return None if found is None else found.format_map(_Written(write))
