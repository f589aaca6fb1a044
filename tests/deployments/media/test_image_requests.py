"""From a request with images to the text that generate() writes: template, processor, wire, shared memory, engine."""

import asyncio
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoImageProcessor, AutoTokenizer

from tests.deployments.http_world import FakePool
from tests.deployments.media.media_checkpoint import MARKS, data_url, encoded, image_part, picture, write_checkpoint
from tests.runtime.media.media_world import CONFIGS, random_model
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
PICTURES = [picture(1, 24, 16), picture(2, 16, 28)]
CONTENT = [
    {"type": "text", "text": "What is "},
    image_part(data_url(encoded(PICTURES[0]))),
    {"type": "text", "text": " beside "},
    image_part(data_url(encoded(PICTURES[1]))),
    {"type": "text", "text": "?"},
]
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return write_checkpoint("llava", tmp_path_factory.mktemp("llava"))


def generated(name, folder):
    """By transformers alone: its processor of images, its tokenizer, its generate()."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    made = AutoImageProcessor.from_pretrained(folder, backend="pil")
    processed = [made(one, return_tensors="pt") for one in PICTURES]
    image, begin, end = MARKS[:3]
    shown = []
    for one in processed:
        if name == "gemma3":
            shown.append(f"\n\n{begin}{16 * image}{end}\n\n")
        else:
            grid = one.get("image_grid_thw")
            shown.append(image * (16 if grid is None else int(grid.prod()) // 4))
    text = f"user: What is {shown[0]} beside {shown[1]}?\nassistant: "
    token_ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    names = [name for name in ("pixel_values", "image_grid_thw") if name in processed[0]]
    given = {name: torch.cat([one[name] for one in processed]) for name in names}
    marks = {"gemma3": "token_type_ids", "llava": None}.get(name, "mm_token_type_ids")
    if marks is not None:
        given[marks] = (token_ids == tokenizer.convert_tokens_to_ids(image)).long()
    model = random_model(name, tokenizer.vocab_size + len(MARKS), tokenizer.convert_tokens_to_ids(image))
    model.set_attn_implementation("eager")
    out = model.generate(token_ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, **given)
    return out[0, token_ids.shape[1] :].tolist()


def service_of(folder, vocab_size, said=SERVED):
    tokenizer = Tokenizer.load(folder)
    pool = FakePool()
    pool.info = ModelInfo("m", max_model_len=256, vocab_size=vocab_size, takes={"image": said})
    return CompletionService(
        pool, tokenizer, prompt_reader=prompt_reader(AppConfig(), pool.info.takes, folder, tokenizer)
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_answer_to_a_request_with_images_is_that_of_generate(name, tmp_path):
    folder = write_checkpoint(name, tmp_path)
    loaded = load_model(folder, torch.float32, torch.device("cpu"))
    assert loaded.takes == {"image": SERVED}
    body = ChatBody.parse(json.dumps({"messages": [{"role": "user", "content": CONTENT}], **GREEDY}).encode())
    generation = asyncio.run(service_of(folder, loaded.vocab_size).plan_chat(body))
    packed, memory = share_spans(WireRequest(3, generation.choices[0].request))
    request = received(attach_spans(packed), "0")
    os.close(memory)
    engine = new_engine(loaded, engine_config())
    engine.add_request(request)
    tokens = []
    while engine.has_unfinished_requests():
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert tokens == generated(name, folder)


def test_text_alone_is_written_in_parts_for_the_template(llava):
    service = service_of(llava, 261, said="images are not served: of this model")
    body = ChatBody.parse(json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode())
    assert service.prompts.chat_text(body) == "user: hello\nassistant: "


@pytest.mark.slow
def test_a_model_of_text_is_served_without_the_libraries_and_the_code_of_media():
    """Where Pillow is installed, transformers imports it for itself."""
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('PIL', 'aiohttp', 'soundfile', 'soxr'))\n"
        "import torch\n"
        "from wingbeat.deployments.parts import first_result\n"
        "from wingbeat.deployments.api.routes import create_app\n"
        "from wingbeat.deployments.app_config import AppConfig\n"
        "from wingbeat.runtime.engine.engine import Engine\n"
        "from wingbeat.runtime.demo import demo_pair\n"
        "from wingbeat.runtime.verifier.loading.loader import load_model\n"
        "loaded = load_model(demo_pair().verifier, torch.float32, torch.device('cpu'))\n"
        "assert first_result('prompt_reader', AppConfig(), loaded.takes, None, None) is None\n"
        "print(*sys.modules)"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    light = {f"wingbeat.deployments.media.{name}" for name in ("part", "settings", "limits", "opening")}
    assert {name for name in got if name.startswith("wingbeat.deployments.media.")} == light
    heavy = {f"wingbeat.runtime.media.{name}" for name in ("families", "processor", "trial", "rows")}
    assert not heavy & set(got)


def test_without_pillow_images_are_refused_by_the_name_of_the_extra(llava, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "wingbeat.deployments.media.decode", raising=False)
    monkeypatch.delitem(sys.modules, "wingbeat.deployments.media.reader", raising=False)
    refused = prompt_reader(AppConfig(), {"image": SERVED}, llava, Tokenizer.load(llava))
    assert isinstance(refused, MediaRefused)
    assert "wingbeat[images]" in refused.reasons["image"]
