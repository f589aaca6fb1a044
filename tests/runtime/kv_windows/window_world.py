"""Engines whose layers with sliding windows keep windows alone, with garbage in all memory that nothing may read."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.runtime.models import Run
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.kv_windows.window_blocks import NO_PLACE
from wingbeat.runtime.kv_windows.window_rows import ModelWindows
from wingbeat.runtime.kv_windows.windowed_cache import WindowedCache
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

GARBAGE = 50.0


@contextmanager
def windowed(loaded: LoadedModel) -> Iterator[LoadedModel]:
    """The model, with the part that lets its layers keep windows alone."""
    loaded.add(ModelWindows(loaded.layers, loaded.dtype, loaded.device))
    try:
        yield loaded
    finally:
        del loaded.parts[ModelWindows.name]


def spoil(engine: Engine) -> int:
    """Overwrite the places that no block has, and count the blocks that have one."""
    cache = engine.cache
    assert isinstance(cache, WindowedCache), "the layers keep whole contexts"
    given = {place for place in cache.beside.places if place != NO_PLACE}
    free = [place for place in range(1, cache.beside.num_places) if place not in given]
    for part in (part for pair in cache.of_windows.values() for part in pair):
        part[free] = GARBAGE
    return len(given)


def finish(run: Run) -> list[list[int]]:
    """All rounds; before each, memory without an owner holds garbage."""
    while run.engine.has_unfinished_requests():
        spoil(run.engine)
        run.step()
    run.engine.check_integrity()
    return run.tokens
