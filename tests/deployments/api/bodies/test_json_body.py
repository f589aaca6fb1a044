"""Bodies that are no strict JSON are refused; bodies that would take long are refused before they are parsed."""

import json
import random
import re

import pytest

from wingbeat.deployments.api.bodies.request_body import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_STRINGS,
    MAX_VALUES,
    JsonShape,
    read_object,
)
from wingbeat.deployments.api.errors import ApiError


def refused(body: bytes) -> str:
    with pytest.raises(ApiError) as caught:
        read_object(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert len(caught.value.message) < 300
    return caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1, "a": 1}',
        b'{"x": {"a": 1, "b": 2, "a": 3}}',
        b'{"x": [1, {"a": {}, "a": 1}]}',
        b'{"a": 1, "\\u0061": 2}',
        b'{"' + b"k" * 4000 + b'": 1, "' + b"k" * 4000 + b'": 2}',
    ],
)
def test_a_key_that_stands_twice_is_refused_at_any_depth(body):
    assert "twice" in refused(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "\\ud800"}',
        b'{"\\udc00": 1}',
        b'{"a": "\\ud800\\u0041"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\xff"}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": [NaN]}',
        b'{"a": ' + b"9" * 100_000 + b"}",
        b'{"a": 01}',
        b'{"a": 1,}',
        b'{"a": 1} {}',
        b"\xef\xbb\xbf{}",
        '{"a": 1}'.encode("utf-16"),
        b"null",
        b"",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_is_not_strict_json_is_refused(body):
    refused(body)


def test_pairs_of_surrogates_are_characters():
    assert read_object(b'{"a": "\\ud83e\\udd8b"}') == {"a": "🦋"}


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_nesting_ends_at_the_limit(opening, closing):
    def nested(depth: int) -> bytes:
        return b'{"a":' + opening * (depth - 1) + b"1" + closing * (depth - 1) + b"}"

    assert read_object(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 5000):
        assert f"more than {MAX_DEPTH} levels" in refused(nested(depth))
    assert read_object(b'{"a": "' + b"[" * 5000 + b'"}')
    refused(b"[" * 1_000_000)


@pytest.mark.parametrize(
    ("item", "count", "noun"),
    [
        (b'""', MAX_STRINGS, "strings"),
        (b"{}", MAX_CONTAINERS, "objects and lists"),
        (b"[]", MAX_CONTAINERS, "objects and lists"),
        (b"1", MAX_VALUES, "values"),
    ],
)
def test_counts_are_bounded(item, count, noun):
    assert f"more than {count} {noun}" in refused(b'{"a": [' + b",".join([item] * count) + b"]}")


def test_counting_a_text_is_counting_what_it_says():
    randomness = random.Random(0)
    for _ in range(1000):
        value = random_value(randomness, 4)
        text = json.dumps(value, ensure_ascii=randomness.random() < 0.5)
        shape = JsonShape.of(text.encode())
        # A second way: without its strings, a JSON text is structure.
        bare = re.sub(r'"(?:[^"\\]|\\.)*"', "s", text)
        assert shape.num_strings == bare.count("s") - bare.count("fals")
        assert shape.num_containers == bare.count("[") + bare.count("{")
        assert shape.num_keys == bare.count(":")
        assert shape.depth == depth(value)
        assert shape.num_values >= num_values(value)


def random_value(randomness: random.Random, levels: int):
    def text() -> str:
        return "".join(randomness.choice('ab"\\[]{},:é\n') for _ in range(randomness.randrange(8)))

    match randomness.randrange(5 if levels else 3):
        case 0:
            return text()
        case 1:
            return randomness.randrange(100)
        case 2:
            return randomness.choice([True, False, None, 0.5])
        case 3:
            return [random_value(randomness, levels - 1) for _ in range(randomness.randrange(4))]
    return {text(): random_value(randomness, levels - 1) for _ in range(randomness.randrange(4))}


def children(value) -> list:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def depth(value) -> int:
    return isinstance(value, dict | list) + max(map(depth, children(value)), default=0)


def num_values(value) -> int:
    return 1 + sum(map(num_values, children(value)))
