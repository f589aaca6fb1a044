"""Metrics of the application, gathered from its engines and routers, in Prometheus' format."""
