"""Unsupported request fields of vLLM, SGLang and llama.cpp, and the handling of each field.

A value that would change the text, or guarantee something about the text, is refused. A field that would only add
something to the answer is ignored, and named in a header of the answer. A field is accepted if it has no effect by
itself, or concerns only where or how fast the request runs.
"""

from collections.abc import Mapping

from wingbeat.deployments.api.bodies.unserved_fields import Unserved, hint, passed_over, refused

_OTHER_NAME = "use '{}' instead"
_GRAMMAR = "use 'structured_outputs' instead"
_THOUGHTS = "reasoning has no limit of its own"
_SAMPLER = "this sampler is not supported"
_SPLIT = "a request is not split between servers"
_MEDIA = "the preprocessing of images and audio cannot be changed"
_ADDED = "the answer has no such field"
_OF_A_SAMPLER = "it has no effect without its sampler, which is refused"
_PLACE = "it concerns where or how a request runs, not its text"


FOREIGN: Mapping[str, Unserved] = {
    # Grammars at the top level.
    "regex": refused(f"{_GRAMMAR}, with 'regex'", ""),
    "ebnf": refused(f"{_GRAMMAR}, with 'grammar'", ""),
    "grammar": refused(_GRAMMAR, ""),
    "json_schema": refused(f"{_GRAMMAR}, with 'json'", "", {}),
    # Stopping.
    "stop_regex": refused("stop strings are plain text", "", []),
    "repetition_detection": refused("repetitions do not end a text"),
    "no_stop_trim": refused(_OTHER_NAME.format("include_stop_str_in_output"), False),
    "n_predict": refused(_OTHER_NAME.format("max_tokens"), -1),
    "t_max_predict_ms": refused("a text has no time limit", -1, 0),
    "n_indent": refused("indentation does not end a text", 0),
    # Reasoning.
    "thinking_token_budget": refused(_THOUGHTS, -1),
    "thinking_budget_tokens": refused(_THOUGHTS, -1),
    "reasoning_budget_tokens": refused(_THOUGHTS, -1),
    "reasoning_control": refused(_THOUGHTS, False),
    "reasoning_budget_message": hint("it has no effect without a budget, which is refused"),
    "reasoning_budget_start_tag": hint("it has no effect without a budget, which is refused"),
    "reasoning_budget_end_tag": hint("it has no effect without a budget, which is refused"),
    "reasoning_budget_end_tags": hint("it has no effect without a budget, which is refused"),
    "reasoning_format": refused("reasoning is always separated from the answer", "auto", "deepseek"),
    "separate_reasoning": refused("reasoning is always separated from the answer", True),
    "stream_reasoning": passed_over("reasoning is always streamed", True),
    # Sampling.
    "custom_logit_processor": refused("code of a client is never run"),
    "custom_params": refused("they are arguments of a client's code", {}),
    "watermark": refused("texts have no watermark", False, {}),
    "watermarking": refused("texts have no watermark", False),
    "repeat_penalty": refused(_OTHER_NAME.format("repetition_penalty"), 1),
    "repeat_last_n": refused("penalties count all tokens", -1),
    "samplers": refused("the order of samplers is fixed", [], ""),
    "min_keep": refused(_SAMPLER, 0),
    "top_n_sigma": refused(_SAMPLER, -1, 0),
    "typical_p": refused(_SAMPLER, 1),
    "xtc_probability": refused(_SAMPLER, 0),
    "xtc_threshold": hint(_OF_A_SAMPLER),
    "dynatemp_range": refused(_SAMPLER, 0),
    "dynatemp_exponent": hint(_OF_A_SAMPLER),
    "dry_multiplier": refused(_SAMPLER, 0),
    "dry_base": hint(_OF_A_SAMPLER),
    "dry_allowed_length": hint(_OF_A_SAMPLER),
    "dry_penalty_last_n": hint(_OF_A_SAMPLER),
    "dry_sequence_breakers": hint(_OF_A_SAMPLER),
    "mirostat": refused(_SAMPLER, 0),
    "mirostat_tau": hint(_OF_A_SAMPLER),
    "mirostat_eta": hint(_OF_A_SAMPLER),
    "adaptive_target": refused(_SAMPLER, -1),
    "adaptive_decay": hint(_OF_A_SAMPLER),
    "backend_sampling": hint(_PLACE),
    # Prompts and models.
    "input_ids": refused("send token ids as the prompt of /v1/completions"),
    "lora_path": refused("'model' names an adapter"),
    "lora": refused("'model' names an adapter", []),
    "session_params": refused("nothing is kept between requests", {}),
    "task": refused("no chat template reads it"),
    "extra_key": refused("'cache_salt' keeps cached prefixes apart", "", []),
    "n_cmpl": refused(_OTHER_NAME.format("n"), 1),
    "n_keep": hint("a prompt is never shifted"),
    "n_discard": hint("a prompt is never shifted"),
    "n_cache_reuse": hint("a prompt is never shifted"),
    "cache_prompt": hint("prefixes are cached anyway"),
    # Images and audio.
    "images_config": refused(_MEDIA, {}),
    "video_config": refused(_MEDIA, {}),
    "media_io_kwargs": refused(_MEDIA, {}),
    "min_dynamic_patch": refused(_MEDIA),
    "max_dynamic_patch": refused(_MEDIA),
    "use_audio_in_video": refused(_MEDIA, False),
    "mm_payload": passed_over(_ADDED, "tensors"),
    # Log-probabilities.
    "n_probs": refused(_OTHER_NAME.format("logprobs"), 0),
    "logprob_token_ids": refused("log-probabilities are of the likeliest tokens", []),
    "post_sampling_probs": refused("log-probabilities are those of the model's logits", False),
    "sampling_logprobs_mode": refused("log-probabilities are those of the model's logits"),
    # Several servers.
    "ec_transfer_params": refused(_SPLIT),
    "bootstrap_host": refused(_SPLIT),
    "bootstrap_port": refused(_SPLIT),
    "bootstrap_room": refused(_SPLIT),
    "data_parallel_rank": hint(_PLACE),
    "routed_dp_rank": hint(_PLACE),
    "disagg_prefill_dp_rank": hint(_PLACE),
    # Additions to an answer.
    **dict.fromkeys(
        (
            *("return_mm_kwargs", "return_prompt_text", "return_token_offsets", "return_weight_versions"),
            *("return_cached_tokens_details", "return_flat_raw_output_top_logprobs"),
            "return_flat_raw_top_logprobs_b64",
            *("return_hidden_states", "return_input_ids_in_sglext", "return_meta_info", "return_output_ids_in_sglext"),
            *("return_prompt_token_ids", "return_routed_experts", "return_sampling_mask", "return_spec_tokens_details"),
            *("return_progress", "return_tokens", "timings_per_token", "verbose"),
        ),
        passed_over(_ADDED, False),
    ),
    "response_fields": passed_over("an answer has all of its fields", []),
    "routed_experts_prompt_start": hint("it has no effect without experts in the answer"),
    "routed_experts_start_len": hint("it has no effect without experts in the answer"),
    "stream_interval": hint("the division of a stream into chunks is not guaranteed"),
    "sse_ping_interval": hint("the division of a stream into chunks is not guaranteed"),
    # Identification of the caller.
    "rid": hint("it identifies the caller"),
    "custom_labels": hint("it identifies the caller"),
}
"""Handling of each field in every body that generates."""

FOREIGN_COMPLETION: Mapping[str, Unserved] = {
    **FOREIGN,
    "max_completion_tokens": refused(_OTHER_NAME.format("max_tokens")),
    "continue_final_message": refused("a prompt is not a conversation", False),
    "mm_processor_kwargs": refused(_MEDIA),
}
"""Handling of each field in `/v1/completions`."""


def unserved_fields(path: str) -> Mapping[str, Unserved]:
    """Returns the handling of other servers' fields at an endpoint that generates."""
    return FOREIGN_COMPLETION if path == "/v1/completions" else FOREIGN
