"""The token that a chat template writes after an answer."""

from pathlib import Path

import pytest

from wingbeat.runtime.tokenizer import Tokenizer

TURNS = {
    "chatml": ("<|im_start|>{role}\n{content}<|im_end|>\n", "<|im_end|>"),
    "llama 3": ("<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>{role}\n{content}<end_of_turn>\n", "<end_of_turn>"),
    "phi": ("<|{role}|>\n{content}<|end|>\n", "<|end|>"),
}


@pytest.mark.parametrize("family", TURNS)
def test_the_token_that_ends_a_turn_ends_a_text(family: str, tiny_model: Path):
    written, end = TURNS[family]
    tokenizer = Tokenizer.load(tiny_model)
    tokenizer.hugging_face.add_special_tokens({"additional_special_tokens": [end, "<|im_start|>"]})
    body = written.replace("{role}", "{{ m['role'] }}").replace("{content}", "{{ m['content'] }}")
    tokenizer.hugging_face.chat_template = f"{{% for m in messages %}}{body}{{% endfor %}}"
    token_id = tokenizer.hugging_face.convert_tokens_to_ids(end)
    assert tokenizer.ends_of_turns(1000) == {0, token_id}
    assert tokenizer.ends_of_turns(token_id) == {0}
