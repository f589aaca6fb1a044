"""Folders that may replace the folder that is served."""

import re
import shutil
from pathlib import Path

import pytest

from tests.runtime.pushed_folder import BAD, edit, pushed_folder
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.successor import Inspected, inspect
from wingbeat.runtime.verifier.checkpoints.digests import check_digest, weights_digest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pushed_folder(tmp_path_factory.mktemp("pushed") / "step-1")


@pytest.mark.parametrize("what", BAD)
def test_what_is_not_the_same_model_is_refused_by_file_field_or_tensor(folder: Path, tmp_path: Path, what: str):
    spoil, reason = BAD[what]
    spoil(bad := shutil.copytree(folder, tmp_path / "bad"))
    found = inspect(bad, demo_pair().verifier)
    assert (found.digest, bool(re.search(reason, found.problem))) == ("", True), found.problem
    assert "\n" not in found.problem


def test_other_weights_of_the_same_model_have_a_digest_of_their_own(folder: Path):
    found = inspect(folder, demo_pair().verifier)
    assert found == Inspected(weights_digest(folder))
    assert found.digest != inspect(demo_pair().verifier, folder).digest


def test_what_a_library_writes_into_a_copy_of_a_config_leaves_the_model_as_it_is(folder: Path, tmp_path: Path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    # transformers of another version spell out what they take by default.
    edit(
        copy, "config.json", transformers_version="9.9", torch_dtype="bfloat16", use_cache=False, attention_dropout=0.0
    )
    assert inspect(copy, demo_pair().verifier).problem is None


def test_a_folder_that_changes_later_is_not_what_was_pushed(folder: Path, tmp_path: Path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    check_digest(copy, digest := weights_digest(folder))
    edit(copy, "config.json", note=1)
    with pytest.raises(ValueError, match="has changed since its weights were pushed"):
        check_digest(copy, digest)
