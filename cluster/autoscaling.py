"""How many verifiers the load asks for: a pure function of what the replicas report."""

from typing import Any

LOAD_METRIC = "num_requests"
"""What each replica records: requests submitted to its engine and not finished, queued ones included."""


def request_load_policy(context: Any) -> tuple[float, dict[str, Any]]:
    """Replicas that would each carry `target_ongoing_requests` of the requests present.

    Serve's own policy counts calls, and to Serve a router's whole traffic is one endless stream. Bounds, delays and
    smoothing are applied by Serve to what this returns.

    Args:
        context: `ray.serve.config.AutoscalingContext` of the Verifier deployment.

    Returns:
        Desired replicas (Serve rounds up) and an empty state.
    """
    reported = (context.aggregated_metrics or {}).get(LOAD_METRIC, {})
    if not reported:
        # A replica that is still starting reports nothing: no load seen is no reason to scale.
        return context.target_num_replicas, {}
    return sum(reported.values()) / context.config.get_target_ongoing_requests(), {}
