"""Lists of docs/http_api.md, and the model that is served in these tests."""

from typing import Any

from tests.optional import FEATURES, is_deleted

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
MAX_LISTED = 1024
"""Entries of `logit_bias`, `stop_token_ids` and `bad_words`."""
MAX_ALLOWED = 2**14
MAX_BAD_CHARS = 2**14
MAX_GRAMMAR_CHARS = 2**16
MAX_LOGPROBS = 20

HAS_GRAMMARS = not is_deleted(FEATURES["grammars"])
GRAMMAR_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
GOOD_GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json_object": True},
    {"json": SCHEMA},
    {"json": '{"enum": ["on", "off", 3]}'},
    {"regex": "[ab]{1,3}"},
    {"regex": "yes|no"},
    {"regex": "(a|aa){1000}"},
    {"choice": ["red", "green", "dark green"]},
    {"choice": ["\u00e9t\u00e9", '"', "\\", "\n", "\U0001f600"]},
    {"grammar": 'root ::= "x" | "y" root'},
)
"""Each compiles."""
BAD_GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json": '{"type": "object"'},
    {"json": "[[["},
    {"json": {"type": "nothing"}},
    {"json": {"$ref": "#/nowhere"}},
    {"regex": "("},
    {"regex": "[z-a]"},
    {"regex": "a{3,1}"},
    {"grammar": 'root ::= "a'},
    {"grammar": 'start ::= "a"'},
    {"grammar": "root ::= unknown"},
    {"grammar": "no grammar"},
    {"structural_tag": {"type": "structural_tag"}},
    {"structural_tag": "{"},
)
"""None does."""

NO_OPS: dict[str, tuple[Any, ...]] = {
    "length_penalty": (None, 1, 1.0),
    "spaces_between_special_tokens": (None, True),
    "use_beam_search": (None, False),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), (None,)),
    **dict.fromkeys(("logits_processors", "kv_transfer_params", "vllm_xargs"), (None,)),
    **({} if HAS_GRAMMARS else {"structured_outputs": (None,), "response_format": (None, {"type": "text"})}),
}
COMPLETION_NO_OPS: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "continue_final_message": (None, False),
    **dict.fromkeys(("prompt_embeds", "mm_processor_kwargs", "max_completion_tokens"), (None,)),
}
CHAT_NO_OPS: dict[str, tuple[Any, ...]] = {
    "echo": (None, False),
    **dict.fromkeys(("chat_template", "mm_processor_kwargs", "audio", "moderation"), (None,)),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "best_of": (None, 1),
    "modalities": (None, ["text"], []),
}
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
"""Fields that a chat template reads, with the values that leave its output unchanged."""
MESSAGE_UNSERVED = ("function_call", "audio", "refusal")
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
