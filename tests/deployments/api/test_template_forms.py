"""Templates that refuse a later system message are given its text as a user's, and the prompt's beginning stays."""

import pytest

from tests.deployments.http_world import FakePool, byte_tokenizer, call
from wingbeat.deployments.api.template_forms.forms import with_system_first

SYSTEM_FIRST = """{%- for m in messages -%}
{%- if m.role == "system" and not loop.first %}{{ raise_exception("System message comes first.") }}{% endif -%}
<{{ m.role }}>{{ m.content }}
{%- endfor -%}"""
ALTERNATING = """{%- set ns = namespace(last="assistant") -%}{%- for m in messages -%}
{%- if m.role == "system" and not loop.first %}{{ raise_exception("system first") }}{% endif -%}
{%- if m.role != "system" -%}
{%- if m.role == ns.last %}{{ raise_exception("roles must alternate") }}{% endif -%}{% set ns.last = m.role %}
{%- endif -%}<{{ m.role }}>{{ m.content }}
{%- endfor -%}"""
ANY_ORDER = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def turn(*roles: str) -> list[dict]:
    return [{"role": role, "content": f"{role[0]}{index}"} for index, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (("system", "user"), "<system>s0<user>u1"),
        (("system", "system", "user"), "<system>s0\n\ns1<user>u2"),
        (("system", "user", "system"), "<system>s0<user>u1\n\ns2"),
        (("user", "system", "assistant", "user"), "<user>u0\n\ns1<assistant>a2<user>u3"),
        (("user", "assistant", "system", "user"), "<user>u0<assistant>a1<user>s2\n\nu3"),
        (("user", "assistant", "system", "system"), "<user>u0<assistant>a1<user>s2\n\ns3"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("template", [SYSTEM_FIRST, ALTERNATING], ids=["system first", "alternating"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_a_later_system_message_is_served(path, template, roles, expected):
    pool, tokenizer = FakePool(), byte_tokenizer(template)
    body = {"messages": turn(*roles), "max_tokens": 4}
    answer = call(pool, path, body, tokenizer=tokenizer)
    assert answer.status_code == 200, answer.text
    assert tokenizer.decode(pool.requests[0].prompt_token_ids) == expected


def test_a_template_that_takes_them_gets_them_as_they_are():
    pool, tokenizer = FakePool(), byte_tokenizer(ANY_ORDER)
    call(
        pool, "/v1/chat/completions", {"messages": turn("user", "system", "user"), "max_tokens": 4}, tokenizer=tokenizer
    )
    assert tokenizer.decode(pool.requests[0].prompt_token_ids) == "<user>u0<system>s1<user>u2"


def test_contents_in_parts_are_joined_in_parts():
    parts = [{"type": "image"}, {"type": "text", "text": "a"}]
    messages = [{"role": "user", "content": parts}, {"role": "system", "content": "b"}]
    assert with_system_first(messages) == [{"role": "user", "content": [*parts, {"type": "text", "text": "b"}]}]
