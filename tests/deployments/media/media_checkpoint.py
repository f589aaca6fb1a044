"""Tiny checkpoints of models that take images or audio, with tokenizer, template and processor, and media for them."""

import base64
import io
import json
import struct
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from tests.runtime.media.media_world import random_model

MARKS = ("<image>", "<begin>", "<end>", "<video>")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}"
    "{% if part['type'] in ('image', 'audio') %}MARK{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_HEARING = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "chunk_length": 1, "n_fft": 400}
PROCESSORS = {
    "llava": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}}
    | {"crop_size": {"height": 16, "width": 16}},
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
    "qwen2_5_vl": {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 2, "merge_size": 2}
    | {"min_pixels": 16, "max_pixels": 256},
    "qwen3_vl": {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 2, "merge_size": 2}
    | {"min_pixels": 16, "max_pixels": 256},
    "qwen2_audio": _HEARING | {"sampling_rate": 16_000, "hop_length": 400},
    "audioflamingo3": _HEARING | {"sampling_rate": 24_000, "hop_length": 1000},
}


def write_checkpoint(name: str, folder: Path) -> Path:
    """A checkpoint of a model of `media_world`, with a token per byte and placeholder tokens for media."""
    entries = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = BackendTokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", *(AddedToken(mark, special=True) for mark in MARKS)])
    template = TEMPLATE.replace("MARK", MARKS[name == "gemma3"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", chat_template=template).save_pretrained(folder)
    random_model(name, vocab_size=len(entries) + len(MARKS), mark=len(entries)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
    return folder


def picture(seed: int = 0, width: int = 24, height: int = 16) -> Image.Image:
    """Noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    """A file's bytes."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    """As requests carry it."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def sound(seed: int = 0, num_samples: int = 8000) -> np.ndarray:
    """Noise: int16 [num_samples]."""
    return np.random.default_rng(seed).integers(-20_000, 20_000, num_samples, dtype=np.int16)


def wav(samples: np.ndarray, rate: int = 16_000, kind: int = 1, bits: int | None = None) -> bytes:
    """A file of samples [num_samples] or [num_samples, num_channels], as wide as they are where `bits` is None."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    bits = bits or 8 * samples.itemsize
    align, data = channels * bits // 8, samples.tobytes()
    header = struct.pack("<HHIIHH", kind, channels, rate, rate * align, align, bits)
    chunks = b"".join(name + struct.pack("<I", len(body)) + body for name, body in ((b"fmt ", header), (b"data", data)))
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def audio_part(data: bytes, audio_format: str = "wav") -> dict:
    """A part of a message."""
    given = {"data": base64.b64encode(data).decode(), "format": audio_format}
    return {"type": "input_audio", "input_audio": given}


def image_part(url: str) -> dict:
    """A part of a message."""
    return {"type": "image_url", "image_url": {"url": url}}
