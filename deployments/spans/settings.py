"""The setting `otlp_traces_endpoint`, and a check for the packages it needs."""

import importlib
from typing import TYPE_CHECKING

from pydantic import Field

from wingbeat.deployments.options.panel_titles import API

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig

EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
SDK = "opentelemetry.sdk.trace"
_WHERE = (
    "URL that OpenTelemetry spans of requests are sent to, such as http://localhost:4318/v1/traces. By default no "
    "spans are written."
)
SETTINGS = {"otlp_traces_endpoint": (str | None, Field(None, description=_WHERE, json_schema_extra={"panel": API}))}


def check_settings(config: "AppConfig") -> None:
    """Raise ValueError if spans are requested but cannot be written; the message is one line that names the package to
    install.
    """
    for module in () if config.otlp_traces_endpoint is None else (SDK, EXPORTER):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(
                f"otlp_traces_endpoint needs a package that is not installed ({error}): pip install 'wingbeat[otel]'"
            ) from None
