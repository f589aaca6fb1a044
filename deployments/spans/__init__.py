"""OpenTelemetry spans of requests."""
