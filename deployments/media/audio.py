"""Decodes audio to mono samples with libsndfile and libsoxr; decoding stops at the maximum duration."""

import io
from collections.abc import Iterator

import numpy as np
import soundfile
import soxr

from wingbeat.deployments.media.limits import MediaError

RATES = (4_000, 192_000)
"""Minimum and maximum sampling rate, in samples per second."""
MOST_CHANNELS = 8
LOUDEST = 32.0
"""Maximum amplitude, in multiples of full scale (1). With much larger samples, the spectrogram would overflow."""
_ENCODINGS = {"wav": {"PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"}, "mp3": {"MPEG_LAYER_III"}}
"""Supported sample encodings of each file format, by libsndfile's names."""
_BLOCK = 2**16
"""Frames decoded at a time."""
_UNKNOWN_BYTES = 0xFFFFFFFF
"""Value of the length field in the header of a WAV file that was written as a stream, when the length was not yet
known.
"""


def decode_audio(data: bytes, audio_format: str | None, rate: int, max_seconds: float) -> np.ndarray:
    """Returns the audio as float32 [num_samples], where full scale is 1: the mean of the channels, resampled to `rate`.

    Args:
        audio_format: `wav` or `mp3` as declared by the request; None detects the format from the first bytes.
        rate: samples per second of the result.
        max_seconds: maximum duration.

    Raises:
        MediaError: the format is not supported or differs from `audio_format`, the file is damaged or too long, or its
            sampling rate, number of channels or encoding is not supported.
    """
    found = _format_of(data)
    if found is None or audio_format not in (None, found):
        said = "wav and mp3 are supported" if audio_format is None else f"its declared format is {audio_format}"
        raise MediaError(f"is not audio that can be decoded; {said}")
    if found == "wav":
        _check_length(data)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check(file, found)
            samples = np.concatenate([np.empty(0, np.float32), *_blocks(file, max_seconds)])
    except soundfile.LibsndfileError as error:
        raise MediaError(f"is a damaged {found} file: {error.error_string}") from error
    resampled = soxr.resample(samples, file.samplerate, rate)
    if not len(resampled):
        raise MediaError("has no samples")
    return resampled


def _format_of(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    is_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2  # layer III
    return "mp3" if data[:3] == b"ID3" or is_frame else None


def _check_length(data: bytes) -> None:
    """Raises MediaError if a WAV file is truncated, because libsndfile would read the rest of such a file without an
    error.
    """
    num_bytes = int.from_bytes(data[4:8], "little")
    # By the format, the length field is the file's size minus 8. Some writers store the whole size, or count a padding
    # byte that is missing, so files up to 8 bytes shorter than the format requires are accepted.
    if len(data) < num_bytes != _UNKNOWN_BYTES:
        raise MediaError(f"is truncated: its header says {num_bytes} bytes, but it has {len(data)}")


def _check(file: soundfile.SoundFile, found: str) -> None:
    if file.subtype not in _ENCODINGS[found]:  # libsndfile also reads other formats after an ID3 tag
        raise MediaError(f"holds {file.subtype_info} in {file.format_info}, which is not supported")
    if file.channels > MOST_CHANNELS:
        raise MediaError(f"has {file.channels} channels, this server takes 1 to {MOST_CHANNELS}")
    if not RATES[0] <= file.samplerate <= RATES[1]:
        raise MediaError(f"has {file.samplerate} samples per second, this server takes {RATES[0]} to {RATES[1]}")


def _blocks(file: soundfile.SoundFile, max_seconds: float) -> Iterator[np.ndarray]:
    """Yields the mean of the channels block by block; raises MediaError at the maximum duration.

    The duration is counted while decoding, because the length in an MP3's header may be wrong.
    """
    num_frames = 0
    while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
        num_frames += len(block)
        if num_frames > max_seconds * file.samplerate:
            raise MediaError(f"lasts longer than {max_seconds:g} s")
        if not (np.abs(block) <= LOUDEST).all():
            raise MediaError(f"has samples that are NaN or infinite, or beyond {LOUDEST:g} times full scale")
        yield block.mean(axis=1)
