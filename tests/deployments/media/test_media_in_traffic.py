"""Images go with their requests: to the engine, to the next one where that dies, and out of memory when all is done."""

import asyncio
import os

import numpy as np
import pytest

from tests.deployments.pool_world import LocalEngines, collect, make_request, run, tokens
from tests.fakes import expected_tokens, wait_until
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.wire import WireRequest, received
from wingbeat.deployments.media.shared import attach_spans, share_spans
from wingbeat.runtime.media.media_input import MediaInput
from wingbeat.runtime.scheduling.request import Request, SamplingParams

ARRAYS = {
    "pixel_values": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "image_grid_thw": np.array([[1, 4, 6]]),
    "nothing": np.zeros((0, 3), dtype=np.float16),
}
IMAGES = (MediaInput.of(1, 2, ARRAYS, (2, 3)), MediaInput.of(4, 1, {"input_features": np.ones(3)}, kind="audio"))


def same(image, other):
    assert image[:3] == other[:3]
    assert (image.grid, image.kind) == (other.grid, other.kind)
    assert image.arrays.keys() == other.arrays.keys()
    return all(
        np.array_equal(array, other.arrays[name]) and array.dtype == other.arrays[name].dtype
        for name, array in image.arrays.items()
    )


def open_memory():
    """Number of this process's open files that hold images."""
    links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
    return sum("wingbeat-media" in link for link in links)


def test_images_come_as_they_were_sent_and_their_pixels_not_through_the_link():
    packed, memory = share_spans(WireRequest(7, Request("a", (1, 2, 3), SamplingParams(), spans=IMAGES)))
    got = received(attach_spans(packed), "a").spans
    os.close(memory)
    assert all(map(same, got, IMAGES))
    assert not packed.request.spans
    assert not any(isinstance(value, np.ndarray) for image in packed.shared.media for value in image.arrays.values())


def test_images_whose_request_has_gone_are_no_images():
    packed, memory = share_spans(WireRequest(7, Request("a", (1, 2, 3), SamplingParams(), spans=IMAGES)))
    os.close(memory)
    with pytest.raises(OSError, match="No such file"):
        attach_spans(packed)


def with_images(**fields):
    request = make_request(**fields)
    return Request(request.request_id, request.prompt_token_ids, request.params, spans=IMAGES)


def test_the_memory_of_images_goes_with_their_requests():
    """The images of a request lie in a file of the replica, and in a file of the engine while it holds the request."""

    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        requests = [asyncio.create_task(collect(pool, with_images(count=40))) for _ in range(3)]
        left = asyncio.create_task(collect(pool, with_images(count=190)))
        await asyncio.to_thread(wait_until, lambda: len(source.engines["a"].taken) == 4)
        assert open_memory() == 8
        left.cancel()
        await asyncio.gather(*requests)
        await asyncio.to_thread(wait_until, lambda: open_memory() == 4)
        assert all(map(same, source.engines["a"].taken[0].spans, IMAGES))
        source.engines["a"].taken.clear()
        await asyncio.to_thread(wait_until, lambda: open_memory() == 0)

    run(scenario, "a")


def test_another_engine_gets_the_images_of_what_it_continues():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        request = asyncio.create_task(collect(pool, with_images(count=150)))
        first = None
        while first is None:
            await asyncio.sleep(0.001)
            first = next((name for name, engine in source.engines.items() if engine.taken), None)
        while not source.engines[first].prompts():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        source.kill(first)
        assert tokens(await request) == expected_tokens((1, 2, 3), 7, 150)
        heir = next(engine for name, engine in source.engines.items() if name != first)
        assert all(map(same, heir.taken[0].spans, IMAGES))

    run(scenario, "a", "b")
