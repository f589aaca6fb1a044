"""From a sound's bytes to samples of one channel. Of one that lasts too long nothing but its header is read."""

import importlib
import io

import numpy as np

from wingbeat.deployments.media.limits import MediaError
from wingbeat.deployments.media.resample import resample
from wingbeat.deployments.media.wav import read_wav

RATES = (4_000, 192_000)
"""Samples per second, at least and at most."""
MOST_CHANNELS = 8
LOUDEST = 32.0
"""Times full scale, which is 1; a spectrogram of much more is no number."""
_BLOCK = 2**16
"""Frames of an mp3 that are decoded at once."""


def decode_audio(data: bytes, audio_format: str | None, rate: int, max_seconds: float) -> np.ndarray:
    """The mean of the channels at a rate: float32 [num_samples].

    Args:
        audio_format: `wav` or `mp3`, what it is said to be; None leaves that to its first bytes.

    Raises:
        MediaError: it is neither, is damaged, lasts too long, or has a rate or channels that are not taken.
    """
    found = _format_of(data)
    if found is None or audio_format not in (None, found):
        said = "wav and mp3 can" if audio_format is None else f"its format is said to be {audio_format}"
        raise MediaError(f"is no audio that can be decoded; {said}")
    samples, source_rate = (_wav if found == "wav" else _mp3)(data, max_seconds)
    if not len(samples):
        raise MediaError("has no samples")
    if not (np.abs(samples) <= LOUDEST).all():
        raise MediaError(f"has samples that are no numbers, or beyond {LOUDEST:g} times full scale")
    return resample(samples, source_rate, rate)


def _format_of(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    is_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2  # layer III
    return "mp3" if data[:3] == b"ID3" or is_frame else None


def _check(channels: int, rate: int, num_frames: int, max_seconds: float) -> None:
    if not 1 <= channels <= MOST_CHANNELS:
        raise MediaError(f"has {channels} channels, this server takes 1 to {MOST_CHANNELS}")
    if not RATES[0] <= rate <= RATES[1]:
        raise MediaError(f"has {rate} samples per second, this server takes {RATES[0]} to {RATES[1]}")
    if num_frames > max_seconds * rate:
        raise MediaError(f"lasts {num_frames / rate:.2f} s; {max_seconds:g} s are the most")


def _wav(data: bytes, max_seconds: float) -> tuple[np.ndarray, int]:
    wav = read_wav(data)
    _check(wav.channels, wav.rate, wav.num_frames, max_seconds)
    return wav.samples(), wav.rate


def _mp3(data: bytes, max_seconds: float) -> tuple[np.ndarray, int]:
    try:
        soundfile = importlib.import_module("soundfile")
    except (ImportError, OSError) as error:  # it looks for its library when it is imported
        raise MediaError("is mp3, which needs soundfile, which is in the extra wingbeat[audio]") from error
    parts, num_frames = [], 0
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.format != "MP3":  # which other formats hide behind an ID3 tag
                raise MediaError(f"is no mp3 but {file.format}")
            _check(file.channels, file.samplerate, 0, max_seconds)
            # What a header says of the length need not be so.
            while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
                num_frames += len(block)
                _check(file.channels, file.samplerate, num_frames, max_seconds)
                parts.append(block.mean(axis=1))
            rate = file.samplerate
    except RuntimeError as error:
        raise MediaError("is no mp3 that can be decoded") from error
    return np.concatenate(parts) if parts else np.zeros(0, np.float32), rate
