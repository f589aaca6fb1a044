"""A chat template that a request brings: it writes the prompt, within limits, or is the request's own error."""

import asyncio
from pathlib import Path

import pytest

from tests.deployments.api.parsed_bodies import chat
from tests.deployments.tool_world import TOKENIZER, ToolPool
from wingbeat.deployments.api.errors import ApiError
from wingbeat.deployments.api.prompts import Prompts
from wingbeat.runtime.tokenizer import Tokenizer

SHOUTING = "{% for message in messages %}{{ message.content | upper }}!{% endfor %}"
DEMO = Path(__file__).parents[3] / "examples" / "demo_pair" / "verifier"


def prompt_of(template: str, takes_templates: bool = True) -> str:
    prompts = Prompts(ToolPool("fine"), TOKENIZER, takes_templates=takes_templates)
    body = chat(messages=[{"role": "user", "content": "hi"}], chat_template=template)
    return TOKENIZER.decode(asyncio.run(prompts.of_chat(body)).token_ids)


@pytest.mark.slow
def test_a_requests_own_template_writes_its_prompt_where_the_server_says_so():
    assert prompt_of(SHOUTING) == "HI!"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "template",
    [
        "{% for",
        "{{ 1 // 0 }}",
        "{{ messages[9].content.x }}",
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_fails_or_leaves_its_sandbox_is_the_requests_own_error(template: str):
    with pytest.raises(ApiError) as refused:
        prompt_of(template)
    assert refused.value.param == "chat_template"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ ('a' * 10 ** 9) | length }}",
        "{{ 'a' * 20000000 }}",
    ],
    ids=["time", "memory", "text"],
)
def test_a_template_that_takes_more_than_it_may_is_the_requests_own_error(template: str):
    with pytest.raises(ApiError, match="takes more than") as refused:
        prompt_of(template)
    assert refused.value.param == "chat_template"


@pytest.mark.slow
def test_a_requests_own_template_reads_what_the_models_does():
    template = "{{ bos_token }}{{ messages[0].role }}{{ mood }}{{ add_generation_prompt }}"
    messages, variables = [{"role": "user", "content": "hi"}], {"mood": "calm"}
    loaded = Tokenizer.load(DEMO, template)
    assert loaded.render_chat(messages, variables, template) == loaded.render_chat(messages, variables)
