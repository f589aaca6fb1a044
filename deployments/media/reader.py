"""From what a request says of its images or its audio to what an engine gets of them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from wingbeat.deployments.media.fetch import Fetcher
from wingbeat.deployments.media.limits import MediaError, MediaLimits
from wingbeat.deployments.media.source import MediaSource, bytes_of
from wingbeat.runtime.media.processor import AudioProcessor, MediaProcessor, ReadMedia

Decode = Callable[[bytes, MediaSource], Any]
"""(bytes, where they are from) -> what a model's processor reads; raises MediaError."""
_AT_ONCE = 2
"""Media that are decoded at the same time: each may take some hundred megabytes meanwhile."""


class BadMedia(MediaError):
    """Which image or sound of a request cannot be used, and why."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index = index


class MediaReader:
    """Reads the media of requests for one model, which are of one kind."""

    def __init__(
        self, processor: MediaProcessor, limits: MediaLimits, decode: Decode, fetcher: Fetcher | None = None
    ) -> None:
        self.processor = processor
        self.limits = limits
        self._decode = decode
        self._fetcher = fetcher or Fetcher(limits, processor.kind)
        self.num_held_bytes = 0
        """Of requests that have not ended."""
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def read(self, sources: Sequence[MediaSource]) -> list[ReadMedia]:
        """The media, in their order.

        Raises:
            BadMedia: one cannot be used.
        """
        media = []
        for index, source in enumerate(sources):
            try:
                data = None if source.is_here else await self._fetcher.fetch(source.text)
                async with self._places:
                    media.append(await asyncio.to_thread(self._read, source, data))
            except MediaError as error:
                raise BadMedia(index, str(error)) from error
        return media

    def _read(self, source: MediaSource, data: bytes | None) -> ReadMedia:
        data = bytes_of(source, self.limits) if data is None else data
        decoded = self._decode(data, source)
        try:
            return self.processor.read(decoded)
        except ValueError as error:
            # Of a shape that the model does not take, such as a strip.
            raise MediaError(f"cannot be read by this model: {error}") from error


def decoder_of(processor: MediaProcessor, limits: MediaLimits) -> Decode:
    """What a processor's media are decoded by.

    Raises:
        ImportError: a library of the extra `images` or `audio` is missing.
        OSError: soundfile finds no libsndfile.
    """
    if isinstance(processor, AudioProcessor):
        from wingbeat.deployments.media.audio import decode_audio

        rate, most = processor.sampling_rate, min(limits.max_audio_s, processor.max_seconds)
        return lambda data, source: decode_audio(data, source.audio_format, rate, most)
    from wingbeat.deployments.media.decode import decode_image

    return lambda data, source: decode_image(data, limits)
