"""Merges the deltas of several choices into one stream."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from wingbeat.deployments.api.answers.generation import ChoiceDelta


async def merged(streams: Sequence[AsyncGenerator[ChoiceDelta, None]]) -> AsyncGenerator[ChoiceDelta, None]:
    """Runs the streams concurrently and yields their deltas. The first error ends all streams; closing this generator
    ends them too.
    """
    arrivals: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[ChoiceDelta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    arrivals.put_nowait(delta)
        except Exception as error:
            arrivals.put_nowait(error)
        else:
            arrivals.put_nowait(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    num_running = len(tasks)
    try:
        while num_running:
            arrival = await arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                num_running -= 1
            else:
                yield arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def first_choices_first(
    deltas: AsyncGenerator[ChoiceDelta, None], choices_per_prompt: int
) -> AsyncGenerator[ChoiceDelta, None]:
    """Yields the deltas, but delays the deltas of a prompt's second and further choices until the first delta of the
    prompt's first choice has been yielded, because only the first choice carries the prompt's log-probabilities.
    """
    waiting: dict[int, list[ChoiceDelta]] = defaultdict(list)
    reported: set[int] = set()
    async with aclosing(deltas):
        async for delta in deltas:
            prompt, sample = divmod(delta.index, choices_per_prompt)
            if sample and prompt not in reported:
                waiting[prompt].append(delta)
                continue
            yield delta
            if prompt not in reported:
                reported.add(prompt)
                for earlier in waiting.pop(prompt, ()):
                    yield earlier
