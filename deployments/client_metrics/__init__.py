"""Figures that routers measure as clients of the engines, exchanged between routers, and metrics under vLLM's names."""
