"""Errors of audio inputs name the field; nothing is decoded beyond the limits."""

import asyncio
import base64
import io
import json
import struct

import numpy as np
import pytest
import soundfile
from aiohttp import web

from tests.deployments.http_world import TOKENIZER, FakePool, call
from tests.deployments.media.media_checkpoint import audio_part, data_url, encoded, image_part, picture, sound, wav
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.unserved_fields import none_ignored
from wingbeat.deployments.api.errors import ApiError
from wingbeat.deployments.media.audio import decode_audio
from wingbeat.deployments.media.fetch import Fetcher
from wingbeat.deployments.media.limits import MediaError, MediaLimits
from wingbeat.deployments.media.opening import MediaRefused
from wingbeat.deployments.media.reader import MediaReader
from wingbeat.runtime.media.processor import ReadMedia

LIMITS = MediaLimits(frozenset({"outer.test", "10.0.0.7"}), max_bytes=2**17, timeout_s=0.5, per_request={"audio": 2})
RATE, MAX_S = 16_000, 3.0
GOOD = wav(sound())


class NoProcessor:
    """Hears everything as one token."""

    kind = "audio"

    def read(self, samples):
        return ReadMedia({}, 1)

    def expand(self, text, media):
        return text

    def place(self, token_ids, media):
        return ()


def reader(fetcher=None):
    return MediaReader(
        NoProcessor(), LIMITS, lambda data, source: decode_audio(data, source.audio_format, RATE, MAX_S), fetcher
    )


def answer(*parts, media=None):
    content = [{"type": "text", "text": "hear"}, *parts]
    fields = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return call(FakePool(), "/v1/chat/completions", fields, tokenizer=TOKENIZER, reader=media or reader())


def header(kind=1, channels=1, rate=RATE, align=2, bits=16, size=8):
    fields = struct.pack("<HHIIHH", kind, channels, rate, 0, align, bits)
    return b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<I", 16) + fields + b"data" + struct.pack("<I", size) + bytes(8)


BAD = {
    "no base64": ({"data": "a*b=", "format": "wav"}, "is not valid base64"),
    "empty": ({"data": "", "format": "wav"}, "is not audio that can be decoded"),
    "text": (b"hello, I am text", "is not audio that can be decoded"),
    "image": (encoded(picture()), "is not audio that can be decoded"),
    "cut off": (GOOD[: len(GOOD) // 2], "is truncated: its header says 16036 bytes, but it has 8022"),
    "no samples": (wav(sound()[:0]), "has no samples"),
    "header alone": (GOOD[:20], "is truncated: its header says 16036 bytes, but it has 20"),
    "no header": (b"RIFF\0\0\0\0WAVEdata\x04\0\0\0abcd", "is a damaged wav file: Error in WAV file"),
    "chunks without end": (b"RIFF\0\0\0\0WAVE" + b"junk\0\0\0\0" * 9000, "No 'data' chunk"),
    "short header": (b"RIFF\0\0\0\0WAVEfmt \x04\0\0\0abcd", "Short 'fmt ' chunk"),
    "3 s and more": (wav(np.zeros(48_001, np.int8) + 1, bits=8), "lasts longer than 3 s"),
    "two hours of one sample a second": (wav(np.zeros(7200, np.int16), rate=1), "has 1 samples per second, this"),
    "many samples a second": (header(rate=2**32 - 1), "is a damaged wav file"),
    "no rate": (header(rate=0), "is a damaged wav file"),
    "no channels": (header(channels=0), "is a damaged wav file: Channel count is zero"),
    "many channels": (wav(np.zeros((4, 9), np.int16)), "has 9 channels, this server takes 1 to 8"),
    "channels without end": (header(channels=2**16 - 1), "is a damaged wav file: Too many channels"),
    "a-law": (header(kind=6, align=1, bits=8), "holds A-Law in WAV (Microsoft), which is not supported"),
    "a burst of one sample": (wav(sound()[:1], rate=192_000), "has no samples"),
    "no numbers": (wav(np.full(900, np.nan, np.float32), kind=3), "has samples that are NaN or infinite"),
    "endlessly loud": (wav(np.full(900, 1e38, np.float32), kind=3), "beyond 32 times full scale"),
    "many bytes": (bytes(2**17 + 3), "has more than 131072 bytes"),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("name", BAD)
def test_a_sound_that_cannot_be_used_is_named(name):
    given, problem = BAD[name]
    part = audio_part(given) if isinstance(given, bytes) else {"type": "input_audio", "input_audio": given}
    got = answer(audio_part(GOOD), part)
    assert got.status_code == 400, got.text
    error = got.json()["error"]
    assert error["param"] == "messages[0].content[2].input_audio.data"
    assert problem in error["message"]


PARTS = {
    "no object": ({"type": "input_audio", "input_audio": "UklG"}, "input_audio", "must be an object with a 'data'"),
    "no data": ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio", "with a 'data'"),
    "no format": ({"type": "input_audio", "input_audio": {"data": ""}}, "input_audio.format", "one of wav, mp3"),
    "flac": ({"type": "input_audio", "input_audio": {"data": "", "format": "flac"}}, "input_audio.format", "wav, mp3"),
    "list": ({"type": "input_audio", "input_audio": {"data": "", "format": []}}, "input_audio.format", "wav, mp3"),
    "rate": (
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav", "sample_rate": 8000}},
        "input_audio.sample_rate",
        "Unknown",
    ),
    "no url": ({"type": "audio_url", "audio_url": {}}, "audio_url", "must be an object with a 'url'"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_malformed_is_named(name):
    part, field, problem = PARTS[name]
    with none_ignored(), pytest.raises(ApiError) as caught:
        ChatBody.parse(json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode())
    assert caught.value.param == f"messages[0].content[0].{field}"
    assert problem in caught.value.message


URLS = {
    "private": ("http://10.0.0.7/a.wav", "is at an address that is not public"),
    "other host": ("http://else.test/a.wav", "is at a host that is not in --allowed-media-domains"),
    "file": ("file:///etc/passwd", "must be a URL of scheme http, https or data"),
    "not of the format that it is": (data_url(b"OggS", "audio/wav"), "is not audio that can be decoded; wav and mp3"),
}


@pytest.mark.parametrize("name", URLS)
def test_a_url_that_may_not_be_fetched_is_named(name):
    url, problem = URLS[name]
    got = answer({"type": "audio_url", "audio_url": {"url": url}})
    assert (got.status_code, got.json()["error"]["param"]) == (400, "messages[0].content[1].audio_url")
    assert problem in got.json()["error"]["message"]


def test_one_sound_too_many_and_a_format_that_it_is_not_are_named():
    got = answer(*[audio_part(GOOD)] * 3)
    assert got.json()["error"]["param"] == "messages[0].content[3].input_audio.data"
    assert "this server takes at most 2 (limit_mm_per_prompt)" in got.json()["error"]["message"]
    assert "its declared format is mp3" in answer(audio_part(GOOD, "mp3")).json()["error"]["message"]


@pytest.mark.parametrize(
    ("media", "part", "reason"),
    [
        (MediaRefused({}), audio_part(GOOD), "'input_audio' are not supported; only 'text' is"),
        (MediaRefused({"audio": "audio is not served with model_type x"}), audio_part(GOOD), "model_type x"),
        (reader(), image_part(data_url(encoded(picture()))), "only 'text', 'input_audio' and 'audio_url' are"),
    ],
)
def test_a_model_that_does_not_hear_refuses_by_the_parts_type(media, part, reason):
    got = answer(part, media=media)
    assert (got.status_code, got.json()["error"]["param"]) == (400, "messages[0].content[1].type")
    assert reason in got.json()["error"]["message"]


def test_a_model_of_text_refuses_audio():
    fields = {"messages": [{"role": "user", "content": [audio_part(GOOD)]}]}
    got = call(FakePool(), "/v1/chat/completions", fields)
    assert (got.status_code, got.json()["error"]["param"]) == (400, "messages[0].content[0].type")


SENT = {
    "half a gigabyte by its header": ({"Content-Length": str(500 * 2**20)}, "has more than 131072 bytes"),
    "a page": ({"Content-Type": "text/html"}, "has the content type text/html, which is not audio"),
    "an image": ({"Content-Type": "image/png"}, "has the content type image/png, which is not audio"),
}


@pytest.mark.parametrize("name", SENT)
def test_what_a_host_says_of_a_sound_is_looked_at_before_it_is_read(name):
    headers, problem = SENT[name]

    async def answers(request):
        response = web.StreamResponse(headers={"Content-Type": "audio/wav", **headers})
        await response.prepare(request)
        await asyncio.sleep(60)

    async def run():
        app = web.Application()
        app.add_routes([web.get("/", answers)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            server = web.TCPSite(runner, "127.0.0.1", 0)
            await server.start()
            port = server._server.sockets[0].getsockname()[1]

            async def resolve(host, port):
                return ["127.0.0.1"]

            with pytest.raises(MediaError, match=problem):
                await Fetcher(LIMITS, "audio", resolve, lambda address: True).fetch(f"http://outer.test:{port}/")
        finally:
            await runner.cleanup()

    asyncio.run(run())


def decoded(data, audio_format=None):
    return decode_audio(data, audio_format, RATE, MAX_S)


def test_samples_of_every_width_are_the_same_sound():
    samples = sound(3, 500) & ~0xFF
    wide = samples.astype(np.int32) << 16
    files = [
        wav(samples),
        wav(wide),
        wav(wide.view(np.uint8).reshape(-1, 4)[:, 1:].reshape(-1), bits=24),
        wav(((samples >> 8) + 128).astype(np.uint8)),
        wav((samples / 2**15).astype(np.float32), kind=3),
        wav(samples / 2**15, kind=3),
        wav(np.stack([samples, samples], axis=1)),
        wav(samples)[:40] + b"\xff\xff\xff\xff" + wav(samples)[44:],
    ]
    assert all(np.array_equal(decoded(file), samples / np.float32(2**15)) for file in files)


def test_channels_are_averaged_and_a_header_of_the_extensible_kind_is_read():
    both = np.stack([sound(1, 300), sound(2, 300)], axis=1)
    assert np.allclose(decoded(wav(both)), both.mean(axis=1) / 2**15)
    plain = struct.pack("<HHIIHH", 0xFFFE, 2, RATE, 0, 4, 16)
    fields = plain + struct.pack("<HHI", 22, 16, 3) + bytes.fromhex("0100000000001000800000aa00389b71")
    body = b"fmt " + struct.pack("<I", 40) + fields + b"data" + struct.pack("<I", both.nbytes) + both.tobytes()
    assert np.array_equal(decoded(b"RIFF\0\0\0\0WAVE" + body), decoded(wav(both)))


@pytest.mark.few(1)
@pytest.mark.parametrize(("source", "target"), [(8_000, 16_000), (44_100, 16_000), (48_000, 16_000), (16_001, 16_000)])
def test_a_tone_at_another_rate_is_the_same_tone(source, target):
    tone = np.sin(2 * np.pi * 440 * np.arange(source) / source).astype(np.float32)
    got = decode_audio(wav(tone, source, kind=3), "wav", target, MAX_S)
    assert (got.dtype, got.shape) == (np.float32, (target,))
    expected = np.sin(2 * np.pi * 440 * np.arange(target) / target)
    assert np.abs(got - expected)[500:-500].max() < 1e-3


def test_what_the_lower_rate_cannot_hold_does_not_fold_back():
    tone = np.sin(2 * np.pi * 15_000 * np.arange(48_000) / 48_000).astype(np.float32)
    assert np.abs(decoded(wav(tone, 48_000, kind=3)))[200:-200].max() < 1e-3


def mp3(seconds):
    tone, buffer = np.sin(2 * np.pi * 440 * np.arange(int(24_000 * seconds)) / 24_000), io.BytesIO()
    soundfile.write(buffer, tone, 24_000, format="MP3")
    return buffer.getvalue()


def test_mp3_is_decoded_and_resampled():
    got = decoded(mp3(1.0), "mp3")
    assert abs(len(got) - RATE) < 1000
    assert 0.6 < np.sqrt((got**2).mean()) < 0.8


def test_a_long_mp3_is_decoded_as_far_as_a_sound_may_last(monkeypatch):
    reads, read = [], soundfile.SoundFile.read

    def counted(*args, **kwargs):
        reads.append(args)
        return read(*args, **kwargs)

    monkeypatch.setattr(soundfile.SoundFile, "read", counted)
    with pytest.raises(MediaError, match="lasts longer than 3 s"):
        decoded(mp3(40.0))
    assert len(reads) == 2


def test_what_is_no_mp3_behind_its_first_bytes_is_refused():
    with pytest.raises(MediaError, match="is a damaged mp3 file"):
        decoded(b"\xff\xfb" + base64.b64encode(bytes(3000)))
    flac = io.BytesIO()
    soundfile.write(flac, np.zeros(2000), 24_000, format="FLAC")
    with pytest.raises(MediaError, match="holds Signed 16 bit PCM in FLAC"):
        decoded(b"ID3\x04\0\0\0\0\0\x04" + bytes(4) + flac.getvalue())
