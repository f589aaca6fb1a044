"""Names of other servers, and settings of old: what to write instead."""

from wingbeat.deployments.options.foreign_rows import Write, written
from wingbeat.deployments.options.speculative_config import PLACE
from wingbeat.deployments.options.vllm_options import VLLM

NOT_NEEDED = "leave it out: "
_DRAFTER = "name the drafter: DRAFTER after MODEL, or {drafter}"
SGLANG = {
    "context_length": "use {max_model_len}",
    "enable_deterministic_inference": "use {deterministic}",
    "max_running_requests": "use {max_num_seqs}",
    "mem_fraction_static": "use {gpu_memory_utilization}",
    "model_path": "use {model}",
    "speculative_algorithm": _DRAFTER,
    "speculative_draft_model_path": _DRAFTER,
    "speculative_eagle_topk": "use {draft_top_k}",
    "speculative_num_draft_tokens": "use {verify_tree_size}",
    "speculative_num_steps": "use {draft_steps}",
    "tp_size": "use {tensor_parallel_size}",
}
"""Options of SGLang, with underscores; what stands in braces is a setting of ours."""

TENSORRT_AND_MLC = {
    "draft_len_schedule": NOT_NEEDED + "{adaptive} decides it each round, by what is measured",
    "draft_step": "use {draft_steps}",
    "dynamic_tree_max_topK": "use {draft_top_k}",
    "kv_cache_page_size": "use {block_size}",
    "max_draft_len": "use {draft_steps}",
    "max_num_sequence": "use {max_num_seqs}",
    "max_single_sequence_length": "use {max_model_len}",
    "max_total_draft_tokens": "use {verify_tree_size}, which counts the root too",
    "prefill_chunk_size": "use {max_num_batched_tokens}",
    "spec_draft_length": "use {draft_steps}",
    "spec_tree_width": "use {draft_top_k}",
    "speculative_mode": _DRAFTER,
    "tensor_parallel_shards": "use {tensor_parallel_size}",
}
"""Options of TensorRT-LLM, TensorRT Edge-LLM and MLC-LLM, likewise."""

DROPPED = {
    "backend": NOT_NEEDED + "{engine_dir} has what runs in the place of weights",
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
_OTHERS = SGLANG | TENSORRT_AND_MLC | DROPPED | {PLACE: _DRAFTER + "; {draft_steps} is its number of tokens"}


def hint(option: str, write: Write = str) -> str | None:
    """What to use in the place of an option that is not here, `--max-cpu-loras` or `max_cpu_loras`; None if unknown.

    Args:
        write: from a setting's name to how it is written where the option was.
    """
    name = option.partition("=")[0].removeprefix("--no-").removeprefix("--").replace("-", "_")
    row = VLLM.get(name)
    if row is not None and row.kind != "same":
        return written(row.says, write)
    return None if name not in _OTHERS else written(_OTHERS[name], write)
