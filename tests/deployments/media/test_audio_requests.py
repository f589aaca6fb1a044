"""From a request with audio to the text that generate() writes: template, processor, wire, shared memory, engine."""

import asyncio
import json
import os
import sys

import numpy as np
import pytest
import torch
from transformers import AudioFlamingo3Processor, AutoFeatureExtractor, AutoTokenizer, Qwen2AudioProcessor

from tests.deployments.http_world import BODIES, FakePool, call
from tests.deployments.media.media_checkpoint import MARKS, audio_part, data_url, sound, wav, write_checkpoint
from tests.runtime.media.media_world import AUDIO_CONFIGS, random_model
from tests.runtime.models import engine_config, new_engine
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.fleet.wire import WireRequest, received
from wingbeat.deployments.media.opening import MediaRefused, prompt_reader
from wingbeat.deployments.media.shared import attach_spans, share_spans
from wingbeat.runtime.media.media_input import SERVED
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.loading.loader import load_model

NUM_TOKENS = 12
RATES = {"qwen2_audio": 16_000, "audioflamingo3": 24_000}
SOUNDS = {"qwen2_audio": [sound(1, 9000), sound(2, 15_999)], "audioflamingo3": [sound(3, 31_000)]}
"""The last one takes two windows. transformers' processor of this family takes one sound for each text."""
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def qwen2_audio(tmp_path_factory):
    return write_checkpoint("qwen2_audio", tmp_path_factory.mktemp("qwen2_audio"))


def content_of(name):
    parts = [{"type": "text", "text": "Hear "}]
    for samples in SOUNDS[name]:
        parts += [audio_part(wav(samples, RATES[name])), {"type": "text", "text": " and "}]
    return parts


def generated(name, folder):
    """By transformers alone: its processor of the whole model, its generate()."""
    tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="<eos>")
    made = AutoFeatureExtractor.from_pretrained(folder)
    kind = {"qwen2_audio": Qwen2AudioProcessor, "audioflamingo3": AudioFlamingo3Processor}[name]
    processor = kind(made, tokenizer, chat_template="none", audio_token=MARKS[0])
    text = f"user: Hear {''.join(f'{MARKS[0]} and ' for _ in SOUNDS[name])}\nassistant: "
    audio = [samples.astype(np.float32) / 2**15 for samples in SOUNDS[name]]
    given = processor(text=[text], audio=audio, sampling_rate=RATES[name], return_tensors="pt")
    given.pop("token_type_ids", None)
    model = random_model(name, tokenizer.vocab_size + len(MARKS), tokenizer.convert_tokens_to_ids(MARKS[0]))
    model.set_attn_implementation("eager")
    out = model.generate(**given, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    return out[0, given["input_ids"].shape[1] :].tolist()


def reader_of(folder, tokenizer):
    return prompt_reader(AppConfig(), {"audio": SERVED}, folder, tokenizer)


def service_of(folder, vocab_size):
    tokenizer, pool = Tokenizer.load(folder), FakePool()
    pool.info = ModelInfo("m", max_model_len=256, vocab_size=vocab_size, takes={"audio": SERVED})
    return CompletionService(pool, tokenizer, prompt_reader=reader_of(folder, tokenizer))


def request_of(name, folder, vocab_size):
    """The engine's request for a chat with audio, through the wire and shared memory."""
    messages = [{"role": "user", "content": content_of(name)}]
    body = ChatBody.parse(json.dumps({"messages": messages, **GREEDY}).encode())
    generation = asyncio.run(service_of(folder, vocab_size).plan_chat(body))
    packed, memory = share_spans(WireRequest(3, generation.choices[0].request))
    request = received(attach_spans(packed), "0")
    os.close(memory)
    assert generation.prompt_details == {"audio_tokens": sum(one.length for one in request.spans)}
    return request


def answered(engine, request):
    """Tokens of the only request."""
    engine.add_request(request)
    tokens = []
    while engine.has_unfinished_requests():
        tokens += [token for output in engine.step() for token in output.token_ids]
    return tokens


@pytest.mark.few(1)
@pytest.mark.parametrize("name", AUDIO_CONFIGS)
def test_the_answer_to_a_request_with_audio_is_that_of_generate(name, tmp_path):
    folder = write_checkpoint(name, tmp_path)
    loaded = load_model(folder, torch.float32, torch.device("cpu"))
    assert loaded.takes == {"audio": SERVED}
    engine = new_engine(loaded, engine_config())
    assert answered(engine, request_of(name, folder, loaded.vocab_size)) == generated(name, folder)
    stats = engine.stats()
    assert stats.parts["media"]["num_encoded"] == len(SOUNDS[name])
    assert stats.device_s["encoder"] > 0


@pytest.mark.parametrize("library", ["soundfile", "soxr", "aiohttp"])
def test_without_a_library_audio_is_refused_by_the_name_of_the_extra(qwen2_audio, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    for name in ("audio", "fetch", "reader"):
        monkeypatch.delitem(sys.modules, f"wingbeat.deployments.media.{name}", raising=False)
    refused = reader_of(qwen2_audio, Tokenizer.load(qwen2_audio))
    assert isinstance(refused, MediaRefused)
    assert refused.reasons["audio"] == "audio needs soundfile, soxr and aiohttp, which are in the extra wingbeat[audio]"


def test_usage_tells_the_tokens_of_audio(qwen2_audio):
    """A second of this model is 40 frames, which are 10 tokens."""
    tokenizer, pool = Tokenizer.load(qwen2_audio), FakePool()
    pool.info = ModelInfo("demo", max_model_len=256, vocab_size=261, takes={"audio": SERVED})
    fields = {"messages": [{"role": "user", "content": [audio_part(wav(sound(1, 16_000)))]}], "max_tokens": 4}
    got = call(pool, "/v1/chat/completions", fields, tokenizer=tokenizer, reader=reader_of(qwen2_audio, tokenizer))
    assert got.status_code == 200, got.text
    assert got.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 1, "audio_tokens": 10}
    assert [one.kind for one in pool.requests[0].spans] == ["audio"]


@pytest.mark.parametrize("other", ["/v1/chat/completions", "/v1/responses"])
def test_audio_is_read_the_same_whichever_part_and_api_has_it(qwen2_audio, other):
    service, data = service_of(qwen2_audio, 261), wav(sound(1))
    text = {"type": "text", "text": "hear"}
    chats = [
        ChatBody.of_fields({"messages": [{"role": "user", "content": [text, part]}]})
        for part in (
            audio_part(data),
            {"type": "audio_url", "audio_url": {"url": data_url(data, "audio/wav")}},
        )
    ]
    if other != "/v1/chat/completions":
        parts = [{"type": "input_text", "text": "hear"}, audio_part(data)]
        chats.append(BODIES[other].of_fields({"input": [{"role": "user", "content": parts}]}).as_chat())
    prompts = [asyncio.run(service.prompts.of_chat(chat)) for chat in chats]
    assert len({prompt.token_ids for prompt in prompts}) == 1
    assert len({prompt.spans[0].digest for prompt in prompts}) == 1


IMAGE = data_url(b"an image", "image/png")
PARTS = {
    "chat": ("/v1/chat/completions", {"type": "input_image", "image_url": IMAGE}, "messages", IMAGE),
    "responses": ("/v1/responses", {"type": "input_image", "image_url": IMAGE, "detail": "auto"}, "input", IMAGE),
    "messages": (
        "/v1/messages",
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "YW4gaW1hZ2U="}},
        "messages",
        "YW4gaW1hZ2U=",
    ),
    "messages by url": (
        "/v1/messages",
        {"type": "image", "source": {"type": "url", "url": "https://a.test/b.png"}},
        "messages",
        "https://a.test/b.png",
    ),
}


@pytest.mark.parametrize("case", PARTS.values(), ids=PARTS)
def test_images_in_the_forms_of_other_apis_are_those_of_a_chat_between_their_texts(case):
    path, part, field, expected = case
    kind = "input_text" if field == "input" else "text"
    content = [{"type": kind, "text": "one"}, part, {"type": kind, "text": "two"}]
    fields = {field: [{"role": "user", "content": content}]}
    fields |= {} if field == "input" else {"max_tokens": 5}
    body = BODIES[path].of_fields(fields)
    chat = body if isinstance(body, ChatBody) else body.as_chat()
    assert [part["type"] for part in chat.template_messages()[0]["content"]] == ["text", "image", "text"]
    assert [one.source.text for one in chat.other_parts] == [expected]
    assert chat.other_parts[0].path.startswith(f"{field}[0].content[1].")
