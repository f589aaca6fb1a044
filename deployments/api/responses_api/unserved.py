"""Unsupported fields of `/v1/responses`, and how each is handled."""

from collections.abc import Mapping

from wingbeat.deployments.api.bodies.unserved_fields import (
    CHECKS,
    COMMON,
    NO_STATE,
    TEXT_ALONE,
    Unserved,
    hint,
    passed_over,
    refused,
)

RESPONSE: Mapping[str, Unserved] = {
    **COMMON,
    "mm_processor_kwargs": refused("the preprocessing of images and audio cannot be changed"),
    "previous_input_messages": refused(f"{NO_STATE}: send the whole input", []),
    "enable_response_messages": passed_over("the answer has no such field", False),
    "previous_response_id": refused(f"{NO_STATE}: send the whole input"),
    "conversation": refused(f"{NO_STATE}: send the whole input"),
    "background": refused(f"{NO_STATE}, so that nobody could fetch the response", False),
    "background_options": refused(NO_STATE),
    "prompt": refused(f"{NO_STATE}: send its text"),
    "top_logprobs": refused("log-probabilities are told in chat completions", 0),
    "moderation": refused(CHECKS),
    "access_programs": refused("this server has no access programs"),
    "image": refused(TEXT_ALONE),
    "context_management": passed_over("an input that is too long is refused, not shortened", []),
    "truncation": passed_over("an input that is too long is refused, not shortened", "disabled"),
    "store": hint(NO_STATE),
    "service_tier": hint("all requests are served alike"),
    "max_tool_calls": hint("it counts calls of hosted tools, of which there are none"),
    "client_metadata": hint("it identifies the caller"),
    "prompt_cache_key": hint("prefixes are cached anyway"),
    "prompt_cache_options": hint("prefixes are cached anyway"),
    "prompt_cache_retention": hint("prefixes are cached anyway"),
    "safety_identifier": hint("it identifies the caller"),
}
