"""Hooks of spans of requests. The implementation is imported only when needed, because commands import this file."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.deployments.api.guard import RequestWatcher
    from wingbeat.deployments.app_config import AppConfig

check_settings = "wingbeat.deployments.spans.settings:check_settings"
settings = "wingbeat.deployments.spans.settings:SETTINGS"


def request_watcher(config: "AppConfig") -> "RequestWatcher | None":
    """Return a watcher that writes spans; None if no endpoint is set."""
    if config.otlp_traces_endpoint is None:
        return None
    from wingbeat.deployments.spans.tracing import RequestTracer, exporting_provider
    from wingbeat.deployments.spans.watcher import SpanWriter

    names = ", ".join(one.model_name() for one in config.served())
    return SpanWriter(RequestTracer(exporting_provider(config.otlp_traces_endpoint, names)))
