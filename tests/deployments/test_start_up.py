"""Output at the end of a start."""

import json
import shlex
from pathlib import Path

import pytest

from wingbeat.deployments.start_up import curl_command
from wingbeat.runtime.tokenizer_file import has_chat_template


@pytest.mark.parametrize(
    ("chats", "path", "field"), [(True, "chat/completions", "messages"), (False, "completions", "prompt")]
)
def test_the_request_to_try_is_a_chat_where_the_model_is_one_of_chats(chats: bool, path: str, field: str):
    words = shlex.split(curl_command("http://x:1", "m", needs_key=False, chats=chats))
    assert words[2] == f"http://x:1/v1/{path}"
    assert field in json.loads(words[-1])


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("chat_template.jinja", "{{ messages }}", True),
        ("chat_template.json", '{"chat_template": "x"}', True),
        ("tokenizer_config.json", '{"chat_template": "x"}', True),
        ("tokenizer_config.json", '{"chat_template": null}', False),
        ("config.json", "{}", False),
    ],
)
def test_a_chat_template_is_found_where_checkpoints_have_it(tmp_path: Path, file: str, content: str, expected: bool):
    (tmp_path / file).write_text(content)
    assert has_chat_template(tmp_path) is expected
