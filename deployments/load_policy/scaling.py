"""Serve's autoscaling settings for replicas that scale by load."""

from typing import Any

from ray.serve.config import AutoscalingPolicy

from wingbeat.cluster.autoscaling import DELAYS, TARGET_QUEUE_S, WAKING, TokenLoadPolicy


def scaling_config(given: dict[str, Any]) -> dict[str, Any]:
    """Return the autoscaling settings with `TokenLoadPolicy` and its delays, unless they name another policy."""
    policy = given.get("policy") or {}
    if "policy_function" in policy:
        return given
    kwargs = {"target_queue_s": TARGET_QUEUE_S} | policy.get("policy_kwargs", {})
    own = AutoscalingPolicy(policy_function=TokenLoadPolicy, policy_kwargs=kwargs)
    return {**DELAYS, **WAKING, **given, "policy": own}
