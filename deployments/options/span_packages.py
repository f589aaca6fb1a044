"""The packages that spans of requests need; they are optional."""

import importlib

EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
SDK = "opentelemetry.sdk.trace"


def check_packages() -> None:
    """Raises ValueError, one line that says what to install, where spans cannot be written."""
    for module in (SDK, EXPORTER):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(
                f"otlp_traces_endpoint needs a package that is not here ({error}): pip install 'wingbeat[otel]'"
            ) from None
