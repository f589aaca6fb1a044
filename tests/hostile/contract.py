"""What docs/http_api.md says in lists, and what is served in these tests."""

from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
HEALTH = "/health"
METRICS = "/metrics"
MODEL = "wingbeat-demo"
KEY = "open-sesame"
VOCAB_SIZE = 4096
CONTEXT = 2048
"""The demo model's `max_model_len`, in tokens."""
MAX_BODY_BYTES = 4 * 2**20
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_DEPTH = 64

NO_OPS: dict[str, tuple[Any, ...]] = {
    **{name: (None, 0, 0.0) for name in ("frequency_penalty", "presence_penalty")},
    **{name: (None, 1, 1.0) for name in ("repetition_penalty", "length_penalty")},
    **{name: (None, 0) for name in ("min_tokens", "priority")},
    **{name: (None, []) for name in ("stop_token_ids", "bad_words")},
    **{name: (None, True) for name in ("skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens")},
    **{
        name: (None, False)
        for name in ("logprobs", "include_stop_str_in_output", "return_token_ids", "use_beam_search")
    },
    "return_tokens_as_token_ids": (None, False),
    "logit_bias": (None, {}),
    **dict.fromkeys(("prompt_logprobs", "allowed_token_ids", "truncate_prompt_tokens", "structured_outputs"), (None,)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "cache_salt"), (None,)),
    **dict.fromkeys(("logits_processors", "kv_transfer_params", "vllm_xargs"), (None,)),
}
COMPLETION_NO_OPS = {"suffix": (None, ""), "prompt_embeds": (None,), "response_format": (None, {"type": "text"})}
CHAT_NO_OPS: dict[str, tuple[Any, ...]] = {
    **{name: (None, False) for name in ("echo", "store")},
    **dict.fromkeys(
        ("chat_template", "mm_processor_kwargs", "functions", "function_call", "audio", "prediction"), (None,)
    ),
    **dict.fromkeys(("web_search_options", "moderation"), (None,)),
    "best_of": (None, 1),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "verbosity": (None, "medium"),
    "service_tier": (None, "auto", "default"),
}
WITHOUT_EFFECT = ("user", "metadata")
CHAT_WITHOUT_EFFECT = (*("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),)
CHAT_TEMPLATE_FIELDS: dict[str, tuple[Any, ...]] = {
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "include_reasoning": (None, True, False),
    "parallel_tool_calls": (None, True, False),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "reasoning_effort": (None,),
}
"""What a chat template reads, with the values under which it writes what it writes without them."""
MESSAGE_UNSERVED = ("function_call", "audio", "refusal", "annotations")
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
