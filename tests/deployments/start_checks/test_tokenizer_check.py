"""Tokenizers that do not belong to their model."""

import json
import shutil
from pathlib import Path

import pytest

from tests.runtime.models import DEMO_PAIR
from wingbeat.deployments.start_checks.tokenizer_check import check_tokenizer_file
from wingbeat.runtime.tensor_files import ModelCheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(DEMO_PAIR / "verifier" / "tokenizer.json", tmp_path)
    return tmp_path


def test_a_tokenizer_that_begins_every_prompt_outside_the_vocabulary_is_refused(folder: Path) -> None:
    file = folder / "tokenizer.json"
    fields = json.loads(file.read_text())
    begin = {"id": 9000, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    fields["added_tokens"].append(begin | {"special": True})
    file.write_text(json.dumps(fields))
    check_tokenizer_file(folder, 4096)
    fields["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<s>", "type_id": 0}})
    fields["post_processor"]["special_tokens"] = {"<s>": {"id": "<s>", "ids": [9000], "tokens": ["<s>"]}}
    file.write_text(json.dumps(fields))
    with pytest.raises(ModelCheckpointError, match=r"puts token id 9000 around every prompt, .* has 4096 rows"):
        check_tokenizer_file(folder, 4096)
