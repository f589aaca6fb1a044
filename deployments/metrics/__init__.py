"""Figures of the application: gathered from its engines and routers, shown to Prometheus."""
