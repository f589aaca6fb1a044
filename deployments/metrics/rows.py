"""Reads rows of metric families from the figures of engines."""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from prometheus_client import Metric

from wingbeat.deployments.metrics.families import gauge
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot

logger = logging.getLogger(__name__)
LABELS = ("model_name", "engine")
Read = Callable[[dict[str, Any]], Any]
"""Function that reads one figure from an engine's figures. The result is None if the figure has no value; KeyError is
raised if the engine does not report the figure.
"""


def figure(*path: str) -> Read:
    """Returns a reader of a nested figure; the reader returns None if a value on the path is None."""

    def read(figures: dict[str, Any]) -> Any:
        for name in path:
            if figures is None:
                return None
            figures = figures[name]
        return figures

    return read


def rows(snapshot: FleetSnapshot, read: Read) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yields (labels, figure) for each engine that reports the figure."""
    for engine_id, figures in snapshot.engines.items():
        try:
            value = read(figures)
        except (KeyError, TypeError) as error:
            # Engines of a user's factory, or of another version of Wingbeat, may lack the figure.
            say_missing(engine_id, repr(error))
            continue
        if value is not None:
            yield (snapshot.model_name, engine_id), value


@lru_cache(maxsize=1024)
def say_missing(engine_id: str, error: str) -> None:
    """Logs that an engine does not report a figure, once per engine and figure."""
    logger.warning("Engine %s lacks a figure, so metrics made of it are missing: %s", engine_id, error)


def by_key(snapshot: FleetSnapshot, read: Read) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the rows of a figure that is a dict; the key is written as an additional label."""
    for labels, table in rows(snapshot, read):
        yield from (((*labels, str(key)), value) for key, value in table.items())


def in_labels(name: str, text: str, configs: Iterable[tuple[tuple[str, str], dict[str, str]]]) -> Metric:
    """Makes a gauge with the value 1 for each engine; the labels contain the engine's configuration."""
    found = list(configs)
    names = sorted({one for _, config in found for one in config})
    values = (((*labels, *(config.get(one, "") for one in names)), 1) for labels, config in found)
    return gauge(name, text, (*LABELS, *names), values)
