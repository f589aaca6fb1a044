"""tokenizer_config.json with one field wrong: refused by one line, or text becomes tokens and comes back."""

import json
import shutil
from pathlib import Path

import pytest

from tests.runtime.models import DEMO_PAIR
from tests.runtime.mutations import Mutation, mutations, some
from wingbeat.runtime.tokenizer import Tokenizer

FILE = "tokenizer_config.json"
TEXT = "def f(a):\n    return a\n"
"""Without the character that a mutation makes a special token."""
TOKENS = Tokenizer.load(DEMO_PAIR / "verifier").encode(TEXT, add_special_tokens=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", FILE, "chat_template.jinja"):
        shutil.copy(DEMO_PAIR / "verifier" / name, tmp_path / name)
    return tmp_path


def check(folder: Path, mutation: Mutation) -> None:
    before = (folder / FILE).read_text()
    mutation.write(folder)
    tokenizer, lines = None, []
    try:
        tokenizer = Tokenizer.load(folder)
    except ValueError as error:
        lines = str(error).splitlines()
    (folder / FILE).write_text(before)
    if tokenizer is None:
        assert len(lines) == 1, lines
        return
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert token_ids == TOKENS, mutation
    assert tokenizer.decode(token_ids) == TEXT, mutation
    rendered = tokenizer.render_chat([{"role": "user", "content": "42"}])
    assert "42" in rendered, mutation


def test_one_wrong_field_is_refused_or_harmless(folder: Path) -> None:
    for mutation in some(mutations(folder, FILE), 20):
        check(folder, mutation)


@pytest.mark.slow
def test_every_wrong_field_is_refused_or_harmless(folder: Path) -> None:
    for mutation in mutations(folder, FILE):
        check(folder, mutation)


@pytest.mark.parametrize("text", ["not JSON", "[]", "{"])
def test_a_file_that_is_no_object_is_refused(folder: Path, text: str) -> None:
    (folder / FILE).write_text(text)
    with pytest.raises(ValueError, match="no tokenizer in") as refused:
        Tokenizer.load(folder)
    assert len(str(refused.value).splitlines()) == 1
    assert json.loads((folder / "config.json").read_text())
