"""Saved prefixes over HTTP: operators make, list and delete them, requests name them."""

import pytest
from pydantic import SecretStr

from tests.deployments.http_world import TOKENIZER, byte_tokenizer, call, chat, complete
from tests.deployments.prefixes.prefix_pool import PrefixPool
from tests.needs import needs
from wingbeat.deployments.api.access import Access
from wingbeat.deployments.fleet.every_engine import EveryEngine
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix
from wingbeat.runtime.scheduling.request import Variant

PATH = "/v1/prefixes"
SYSTEM = [{"role": "system", "content": "Be brief."}]
TURNS = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
ALONE = "{% for m in messages %}{% if not loop.first %}{{ raise_exception('1') }}{% endif %}{{ m.content }}{% endfor %}"
WITH_TOOLS = "{% for t in tools or [] %}[{{ t['function']['name'] }}]{% endfor %}" + TURNS
STRICT = "{% if messages[-1]['role'] == 'system' %}{{ raise_exception('no user') }}{% endif %}" + TURNS
ALTERNATING = (
    "{% for m in messages %}{% if loop.index0 and m['role'] == messages[loop.index0 - 1]['role'] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + TURNS
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SQL = Variant("sql", "/adapters/sql", "d1")


def save(pool, name="p", template=TURNS, **fields):
    return call(pool, PATH, {"name": name, **fields}, tokenizer=byte_tokenizer(template))


def text_of(pool: PrefixPool, index: int = -1) -> str:
    """The prompt that an engine was given."""
    return TOKENIZER.decode(pool.requests[index].prompt_token_ids)


def saved_text(pool: PrefixPool, name: str = "p") -> str:
    return TOKENIZER.decode(pool.prefixes.catalog.find(name).token_ids)


def ask(pool, template=TURNS, **fields):
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return call(pool, "/v1/chat/completions", body, tokenizer=byte_tokenizer(template))


def test_a_prefix_is_made_listed_and_deleted():
    pool = PrefixPool()
    card = {"object": "prefix", "name": "p", "model": "demo", "tokens": 9, "blocks": 2, "bytes": 200}
    card |= {"engines": 1, "saved": "/kept/p"}
    made = save(pool, prompt="Be brief.")
    assert (made.status_code, made.json()) == (200, card)
    listed = call(pool, PATH, method="GET").json()
    assert listed == {"object": "list", "data": [card], "pinned_tokens": 8, "max_pinned_tokens": 40}
    assert call(pool, f"{PATH}/p", method="DELETE").json() == {"object": "prefix", "name": "p", "deleted": True}
    assert pool.prefix_engine.told[-1]["prefixes"][0].thing is None
    assert call(pool, PATH, method="GET").json()["data"] == []
    again = call(pool, f"{PATH}/p", method="DELETE")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "prefix_not_found")


def test_a_completions_prompt_stands_behind_the_prefix():
    pool = PrefixPool()
    save(pool, prompt=[1, 2, 3, 4])
    complete(pool, prompt=[9], prefix="p")
    assert pool.requests[-1].prompt_token_ids == (1, 2, 3, 4, 9)
    save(pool, name="t", prompt="Be brief.")
    answer = complete(pool, prompt=["hi", "ho"], prefix="t", echo=True)
    assert [text_of(pool, -2), text_of(pool)] == ["Be brief.hi", "Be brief.ho"]
    assert [choice["text"][:11] for choice in answer.json()["choices"]] == ["Be brief.hi", "Be brief.ho"]
    assert answer.json()["usage"]["prompt_tokens"] == 22


def test_a_chat_goes_on_from_the_prefixs_messages():
    pool = PrefixPool()
    save(pool, messages=SYSTEM)
    assert saved_text(pool) == "<system>Be brief.<user>"
    ask(pool, prefix="p")
    assert text_of(pool) == "<system>Be brief.<user>hi>"
    ask(pool, messages=[*SYSTEM, {"role": "user", "content": "hi"}])
    assert pool.requests[-1].prompt_token_ids == pool.requests[-2].prompt_token_ids


@needs("parsing")
def test_what_the_template_reads_comes_from_the_prefix_unless_the_request_has_its_own():
    pool = PrefixPool()
    save(pool, template=WITH_TOOLS, messages=SYSTEM, tools=[TOOL])
    ask(pool, WITH_TOOLS, prefix="p", tool_choice="none")
    assert text_of(pool) == "[add]<system>Be brief.<user>hi>"
    other = {"type": "function", "function": {"name": "sub"}}
    ask(pool, WITH_TOOLS, prefix="p", tools=[other], tool_choice="none")
    assert text_of(pool) == "[sub]<system>Be brief.<user>hi>"


@needs("parsing")
def test_messages_of_several_turns_and_calls_come_back_as_they_were_sent():
    call_part = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call_part]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    template = (
        "{% for m in messages %}<{{ m['role'] }}{% for c in m.tool_calls or [] %} "
        "{{ c.function.name }} {{ c.function.arguments.a }}{% endfor %}>{{ m['content'] }}{% endfor %}"
    )
    pool = PrefixPool()
    assert save(pool, template=template, messages=messages, tools=[TOOL]).status_code == 200
    ask(pool, template, prefix="p", tool_choice="none")
    assert text_of(pool) == "<user>1?<assistant add 1><tool>2<user>hi"


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (STRICT, SYSTEM, "<system>Be brief.<user>"),
        (ALTERNATING, [{"role": "user", "content": "1?"}], "<user>1?<assistant>"),
        (TURNS, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}], "<user>?<assistant>.<user>"),
        (ALONE, SYSTEM, "Be brief."),
    ],
)
def test_the_tokens_of_messages_are_those_that_every_conversation_has(template, messages, expected):
    pool = PrefixPool()
    assert save(pool, template=template, messages=messages).status_code == 200
    assert saved_text(pool) == expected


def test_a_prefix_of_an_adapter_is_for_its_requests_alone():
    pool = PrefixPool()
    pool.variants.put("sql", SQL)
    made = save(pool, prompt="Be brief.", model="sql")
    assert made.json()["model"] == "sql"
    assert pool.prefixes.catalog.find("p").variant == SQL
    assert complete(pool, prefix="p", model="sql").status_code == 200
    for fields in ({"model": "demo"}, {"model": None}):
        error = complete(pool, prefix="p", **fields).json()["error"]
        assert (error["param"], error["code"]) == ("prefix", "invalid_value")


def test_a_name_is_taken_until_it_is_replaced():
    pool = PrefixPool()
    save(pool, prompt="Be brief.")
    again = save(pool, prompt="Be long.")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "name")
    assert save(pool, prompt="Be long.", replace=True).status_code == 200
    assert saved_text(pool) == "Be long."


def test_what_one_engine_refuses_is_let_go_of_by_all():
    pool = PrefixPool()
    refused = save(pool, prompt="x" * 41)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "prompt", "pinned_memory_exceeded")
    assert error["message"] == "'prompt' needs more than 40."
    assert pool.prefix_engine.dropped == ["p"]
    assert call(pool, PATH, method="GET").json()["data"] == []
    assert save(pool, messages=[{"role": "system", "content": "x" * 41}]).json()["error"]["param"] == "messages"


def test_without_a_prompt_the_prefix_is_that_of_the_file():
    pool = PrefixPool()
    pool.prefix_engine.files["p"] = SavedPrefix("p", 3, (5, 6, 7, 8))
    assert save(pool).status_code == 200
    kept = pool.prefixes.catalog.find("p")
    assert (kept.token_ids, kept.version > 3) == ((5, 6, 7, 8), True)
    error = save(pool, name="q").json()["error"]
    assert (error["param"], error["code"]) == ("name", "invalid_value")


def test_a_file_of_an_adapter_that_is_not_loaded_is_refused():
    pool = PrefixPool()
    pool.prefix_engine.files["p"] = SavedPrefix("p", 3, (5, 6, 7, 8), SQL)
    assert "'sql', which is not loaded" in save(pool).json()["error"]["message"]
    pool.variants.put("sql", SQL._replace(digest="d2"))
    save(pool)
    assert pool.prefixes.catalog.find("p").variant.digest == "d2"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": "a"}, "name", "missing_required_parameter"),
        ({"name": "", "prompt": "a"}, "name", "invalid_value"),
        ({"name": "../x", "prompt": "a"}, "name", "invalid_value"),
        ({"name": ".x", "prompt": "a"}, "name", "invalid_value"),
        ({"name": "a" * 129, "prompt": "a"}, "name", "invalid_value"),
        ({"name": 3, "prompt": "a"}, "name", "invalid_type"),
        ({"name": "p", "prompt": "a", "messages": SYSTEM}, "prompt", "invalid_value"),
        ({"name": "p", "add_special_tokens": False, "messages": SYSTEM}, "add_special_tokens", "invalid_value"),
        ({"name": "p", "prompt": "a", "tools": [TOOL]}, "tools", "invalid_value"),
        ({"name": "p", "messages": [{"role": "x", "content": ""}]}, "messages[0].role", "invalid_value"),
        ({"name": "p", "messages": []}, "messages", "invalid_value"),
        ({"name": "p", "prompt": "a" * 65}, "prompt", "context_length_exceeded"),
        ({"name": "p", "prompt": [1] * 65}, "prompt", "context_length_exceeded"),
        ({"name": "p", "messages": [{"role": "user", "content": "a" * 65}]}, "messages", "context_length_exceeded"),
        ({"name": "p", "prompt": "a", "temperature": 1}, "temperature", "unknown_parameter"),
        ({"name": "p", "prompt": "a", "model": "other"}, "model", "model_not_found"),
    ],
)
def test_what_is_wrong_with_a_prefix_is_refused_by_the_fields_name(fields, param, code):
    answer = call(PrefixPool(), PATH, fields)
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert answer.status_code == (404 if code == "model_not_found" else 400)


def test_a_template_that_refuses_the_messages_is_a_400():
    error = save(PrefixPool(), template="{{ raise_exception('never') }}", messages=SYSTEM).json()["error"]
    assert (error["param"], "never" in error["message"]) == ("messages", True)


def test_a_request_for_a_prefix_that_there_is_not_names_the_field():
    for answer in (complete(PrefixPool(), prefix="p"), chat(PrefixPool(), prefix="p")):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (404, "prefix", "prefix_not_found")


def test_a_chat_behind_a_plain_prompt_and_a_cut_prompt_are_refused():
    pool = PrefixPool()
    save(pool, prompt="Be brief.")
    assert chat(pool, prefix="p").json()["error"]["param"] == "prefix"
    cut = complete(pool, prefix="p", truncate_prompt_tokens=3)
    assert (cut.status_code, cut.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_prefix_and_prompt_together_must_fit_the_context():
    pool = PrefixPool()
    save(pool, prompt="x" * 40)
    error = complete(pool, prefix="p", prompt="y" * 20, max_tokens=10).json()["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")


def test_an_operators_key_opens_them_and_a_clients_does_not():
    access = Access(api_keys=(SecretStr("client"),), operator_keys=(SecretStr("operator"),))
    pool = PrefixPool()
    for key, status in (("client", 401), ("operator", 200)):
        headers = {"Authorization": f"Bearer {key}"}
        body = {"name": "p", "prompt": "Be brief."}
        assert call(pool, PATH, body, headers=headers, access=access).status_code == status
        assert call(pool, PATH, None, "GET", headers, access=access).status_code == status
        assert call(pool, f"{PATH}/p", None, "DELETE", headers, access=access).status_code == status
    open_to_clients = call(pool, PATH, None, "GET", access=Access(operators_only_by_key=True))
    assert (open_to_clients.status_code, open_to_clients.json()["error"]["code"]) == (403, "operator_key_not_set")


def test_without_an_engine_there_is_a_503():
    pool = PrefixPool()
    pool.every_engine = EveryEngine(pool.prefix_engine.call, list)
    for answer in (save(pool, prompt="Be brief."), save(pool), call(pool, PATH, method="GET")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
