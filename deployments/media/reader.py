"""From what a request says of its images to what an engine gets of them."""

import asyncio
from collections.abc import Sequence

from wingbeat.deployments.media.decode import data_url_bytes, decode_image
from wingbeat.deployments.media.fetch import Fetcher
from wingbeat.deployments.media.limits import MediaError, MediaLimits
from wingbeat.runtime.media.processor import ImageProcessor, ReadMedia

_AT_ONCE = 2
"""Images that are decoded at the same time: each may take some hundred megabytes meanwhile."""


class BadMedia(MediaError):
    """Which image of a request cannot be used, and why."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index = index


class MediaReader:
    """Reads the images of requests for one model."""

    def __init__(self, processor: ImageProcessor, limits: MediaLimits, fetcher: Fetcher | None = None) -> None:
        self.processor = processor
        self.limits = limits
        self._fetcher = fetcher or Fetcher(limits)
        self.num_held_bytes = 0
        """Of requests that have not ended."""
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def read(self, urls: Sequence[str]) -> list[ReadMedia]:
        """The images, in their order.

        Raises:
            BadMedia: one cannot be used.
        """
        images = []
        for index, url in enumerate(urls):
            try:
                data = None if _is_data(url) else await self._fetcher.fetch(url)
                async with self._places:
                    images.append(await asyncio.to_thread(self._read, url, data))
            except MediaError as error:
                raise BadMedia(index, str(error)) from error
        return images

    def _read(self, url: str, data: bytes | None) -> ReadMedia:
        data = data_url_bytes(url, self.limits) if data is None else data
        picture = decode_image(data, self.limits)
        try:
            return self.processor.read(picture)
        except ValueError as error:
            # Of a shape that the model does not take, such as a strip.
            raise MediaError(f"cannot be read by this model: {error}") from error


def _is_data(url: str) -> bool:
    return url[:5].lower() == "data:"
