"""Unsupported fields of `/v1/messages`, and how each is handled."""

from collections.abc import Mapping

from wingbeat.deployments.api.bodies.unserved_fields import COMMON, Unserved, hint, passed_over, refused

ANTHROPIC_PROMPT: Mapping[str, Unserved] = {
    "cache_control": hint("prefixes are cached anyway"),
    "mcp_servers": passed_over("tools of other services are not run here", []),
    "context_management": passed_over("a prompt that is too long is refused, not shortened"),
    "container": passed_over("tools of other services are not run here"),
    "speed": hint("all requests are served alike"),
    "diagnostics": passed_over("the answer has 'metrics'"),
    "user_profile_id": hint("it identifies the caller"),
    "betas": hint("what is served is served without a beta's name"),
    "workspace_id": hint("it identifies the caller"),
}

ANTHROPIC_MESSAGE: Mapping[str, Unserved] = {
    **COMMON,
    **ANTHROPIC_PROMPT,
    "service_tier": hint("all requests are served alike"),
    "inference_geo": refused("where texts are computed is a promise that this server cannot give"),
}
