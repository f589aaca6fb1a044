"""A saved prefix with images over HTTP."""

import json

from tests.deployments.http_world import call
from tests.deployments.media.test_image_requests import CONTENT, llava  # noqa: F401 - a fixture
from tests.deployments.prefixes.prefix_pool import PrefixPool
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.media.opening import prompt_reader
from wingbeat.runtime.media.media_input import SERVED
from wingbeat.runtime.tokenizer import Tokenizer


def test_a_saved_prefix_with_images_is_the_beginning_of_the_requests_that_name_it(llava):  # noqa: F811
    tokenizer, pool = Tokenizer.load(llava), PrefixPool()
    pool.info = ModelInfo("demo", max_model_len=256, vocab_size=261, takes={"image": SERVED})
    given = {"tokenizer": tokenizer, "reader": prompt_reader(AppConfig(), {"image": SERVED}, llava, tokenizer)}
    content = [CONTENT[1], {"type": "text", "text": "?"}]
    saved = call(pool, "/v1/prefixes", {"name": "p", "messages": [{"role": "user", "content": content}]}, **given)
    assert saved.status_code == 200, saved.text
    prefix = pool.prefixes.catalog.find("p")
    assert len(prefix.spans) == 1
    assert json.loads(prefix.conversation)["messages"][0]["content"] == content
    messages = [{"role": "assistant", "content": "a"}, {"role": "user", "content": [CONTENT[3], CONTENT[1]]}]
    fields = {"model": "demo", "prefix": "p", "messages": messages, "max_tokens": 2}
    answer = call(pool, "/v1/chat/completions", fields, **given)
    assert answer.status_code == 200, answer.text
    request = pool.requests[-1]
    assert request.prompt_token_ids[: len(prefix.token_ids)] == prefix.token_ids
    assert request.spans[:1] == prefix.spans
    assert [one.digest == prefix.spans[0].digest for one in request.spans] == [True, False, True]
