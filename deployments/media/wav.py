"""WAV files: samples as integers or floats, in the layout of Microsoft's and IBM's RIFF."""

import struct
from typing import NamedTuple

import numpy as np

from wingbeat.deployments.media.limits import MediaError

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_MOST_CHUNKS = 64
"""That are looked at before the samples."""
_TO_THE_END = 0xFFFFFFFF
"""The length that is written where it was not known."""
_KINDS = {
    (_PCM, 8): "u1",
    (_PCM, 16): "<i2",
    (_PCM, 24): "u1",
    (_PCM, 32): "<i4",
    (_FLOAT, 32): "<f4",
    (_FLOAT, 64): "<f8",
}


class Wav(NamedTuple):
    """A header that holds together, and where the samples are."""

    channels: int
    rate: int
    is_float: bool
    bits: int
    data: memoryview

    @property
    def num_frames(self) -> int:
        """Samples of each channel."""
        return len(self.data) // (self.channels * self.bits // 8)

    def samples(self) -> np.ndarray:
        """The mean of the channels, full scale is 1: float32 [num_frames]."""
        count = self.num_frames * self.channels
        raw = np.frombuffer(self.data[: count * self.bits // 8], _KINDS[_FLOAT if self.is_float else _PCM, self.bits])
        if self.is_float:
            values = raw
        elif self.bits == 8:
            values = (raw.astype(np.float32) - 128) / 128
        elif self.bits == 24:
            wide = np.zeros((count, 4), np.uint8)
            wide[:, 1:] = raw.reshape(count, 3)
            values = wide.view("<i4")[:, 0] / np.float32(2**31)
        else:
            values = raw / np.float32(2 ** (self.bits - 1))
        with np.errstate(over="ignore", invalid="ignore"):  # of floats that are no numbers, which a caller looks for
            return values.reshape(-1, self.channels).mean(axis=1, dtype=np.float32)


def read_wav(data: bytes) -> Wav:
    """The header of a file; no sample is read.

    Raises:
        MediaError: a part is missing or cut off, does not fit another one, or is of a kind that is not read.
    """
    at, header = 12, None
    for _ in range(_MOST_CHUNKS):
        if at + 8 > len(data):
            break
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        body = memoryview(data)[at + 8 :]
        if name == b"data" and header is not None:
            if size != _TO_THE_END and size > len(body):
                raise MediaError(f"is cut off: it says that it has {size} bytes of samples, and has {len(body)}")
            return header._replace(data=body[:size])
        if name == b"fmt ":
            header = _header(bytes(body[: min(size, 40)]))
        at += 8 + size + size % 2
    raise MediaError("is a damaged wav file: its header or its samples are missing")


def _header(fields: bytes) -> Wav:
    if len(fields) < 16:
        raise MediaError("is a damaged wav file: its header is cut off")
    kind, channels, rate, _, align, bits = struct.unpack("<HHIIHH", fields[:16])
    if kind == _EXTENSIBLE and len(fields) >= 26:
        kind = int.from_bytes(fields[24:26], "little")
    if (kind, bits) not in _KINDS:
        raise MediaError(
            f"is a wav file of format {kind} with {bits} bits; integers of 8 to 32 bits and floats are read"
        )
    if not channels or align != channels * bits // 8:
        raise MediaError(f"is a damaged wav file: {channels} channels of {bits} bits are not {align} bytes")
    return Wav(channels, rate, kind == _FLOAT, bits, memoryview(b""))
