"""Bodies that are compressed are refused before anything is unpacked."""

import gzip
import json

import pytest

from tests.deployments.http_world import FakePool, call
from tests.optional import kept

BODY = {"model": "demo", "prompt": "hi", "max_tokens": 4}
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize", "/v1/embeddings")


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "br", "zstd", "gzip, gzip", "x-unknown"])
def test_a_compressed_body_is_a_415_that_names_what_is_taken(encoding):
    pool = FakePool()
    body = gzip.compress(json.dumps(BODY).encode())
    for path in kept(dict.fromkeys(PATHS)):
        answer = call(pool, path, body, headers={"Content-Encoding": encoding})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type"), path
        assert "Content-Encoding" in answer.json()["error"]["message"]
        assert answer.headers["accept-encoding"] == "identity"
    assert pool.requests == []


def test_a_body_that_is_said_to_be_as_it_is_is_read():
    assert call(FakePool(), "/v1/completions", BODY, headers={"Content-Encoding": "identity"}).status_code == 200
