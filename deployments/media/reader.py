"""Reads the images or audio of chat requests and prepares them for the engine."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.content_parts import unserved_part
from wingbeat.deployments.api.errors import invalid
from wingbeat.deployments.fleet.interface import EngineOverloaded
from wingbeat.deployments.media.fetch import Fetcher
from wingbeat.deployments.media.limits import MediaError, MediaLimits
from wingbeat.deployments.media.source import MediaSource, bytes_of
from wingbeat.runtime.media.media_input import AUDIO, IMAGE, MediaInput
from wingbeat.runtime.media.processor import AudioProcessor, MediaProcessor, ReadMedia
from wingbeat.runtime.scheduling.prompt_spans import PromptSpan

Decode = Callable[[bytes, MediaSource], Any]
"""Function (bytes, source) -> decoded media for the model's processor; raises MediaError."""
_PARTS = {IMAGE: "'text' and 'image_url' are", AUDIO: "'text', 'input_audio' and 'audio_url' are"}
_AT_ONCE = 2
"""Maximum number of files decoded at the same time, because decoding a file may need some hundred megabytes of
memory.
"""


class MediaReader:
    """Reads the media of requests for one model that accepts one kind of media."""

    def __init__(
        self, processor: MediaProcessor, limits: MediaLimits, decode: Decode, fetcher: Fetcher | None = None
    ) -> None:
        self.processor = processor
        self.limits = limits
        self._decode = decode
        self._fetcher = fetcher or Fetcher(limits, processor.kind)
        self.num_held_bytes = 0
        """Bytes of decoded media of running requests."""
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def read(self, body: ChatBody) -> list[ReadMedia]:
        """Fetches, decodes and prepares a request's media, in the order of their parts.

        Raises:
            ApiError: 400, naming the part that cannot be used or the field that conflicts with media.
        """
        parts: list[Any] = [*body.other_parts]
        kind = self.processor.kind
        if (other := next((part for part in parts if part.type != kind), None)) is not None:
            raise unserved_part(other.part_type, other.part_path, f"only {_PARTS[kind]}")
        limit = self.limits.per_request[kind]
        if len(parts) > limit:
            problem = f"is {kind} {limit + 1} of the request; this server takes at most {limit} (limit_mm_per_prompt)"
            raise invalid(parts[limit].path, problem)
        if body.truncate_prompt_tokens is not None:
            raise invalid("truncate_prompt_tokens", "cannot be used with images or audio, which would be cut")
        media = []
        for part in parts:
            try:
                data = None if part.source.is_here else await self._fetcher.fetch(part.source.text)
                async with self._places:
                    media.append(await asyncio.to_thread(self._read, part.source, data))
            except MediaError as error:
                raise invalid(part.path, str(error)) from error
        return media

    def expand(self, text: str, parts: Sequence[ReadMedia]) -> str:
        """See `PromptReader.expand`; raises ApiError if the text's placeholders do not match its media."""
        try:
            return self.processor.expand(text, parts)
        except ValueError as error:
            raise invalid("messages", str(error)) from error

    def place(self, token_ids: Sequence[int], parts: Sequence[ReadMedia]) -> tuple[MediaInput, ...]:
        """See `PromptReader.place`; raises ApiError if the prompt's tokens do not match its media."""
        try:
            return self.processor.place(token_ids, parts)
        except ValueError as error:
            raise invalid("messages", str(error)) from error

    @contextmanager
    def held(self, spans: Sequence[PromptSpan]) -> Iterator[None]:
        """See `PromptReader.held`."""
        num_bytes = sum(one.num_bytes for one in spans)
        if self.num_held_bytes and self.num_held_bytes + num_bytes > self.limits.max_held_bytes:
            raise EngineOverloaded("There is no room for more images or audio now. Retry shortly.")
        self.num_held_bytes += num_bytes
        try:
            yield
        finally:
            self.num_held_bytes -= num_bytes

    def _read(self, source: MediaSource, data: bytes | None) -> ReadMedia:
        data = bytes_of(source, self.limits) if data is None else data
        decoded = self._decode(data, source)
        try:
            return self.processor.read(decoded)
        except ValueError as error:
            # The model's processor does not accept an image of this shape, for example a very narrow image.
            raise MediaError(f"cannot be read by this model: {error}") from error


def decoder_of(processor: MediaProcessor, limits: MediaLimits) -> Decode:
    """Returns the decoder for a processor's kind of media.

    Raises:
        ImportError: a library of the extra `images` or `audio` is missing.
        OSError: soundfile does not find libsndfile.
    """
    if isinstance(processor, AudioProcessor):
        from wingbeat.deployments.media.audio import decode_audio

        rate, most = processor.sampling_rate, min(limits.max_audio_s, processor.max_seconds)
        return lambda data, source: decode_audio(data, source.audio_format, rate, most)
    from wingbeat.deployments.media.decode import decode_image

    return lambda data, source: decode_image(data, limits)
