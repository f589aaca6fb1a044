"""Whether a drafter fits its verifier is told before anything is loaded."""

import json

import pytest

from tests.runtime.drafter_kinds import KINDS
from tests.runtime.models import HIDDEN_SIZE
from wingbeat.runtime.checks.drafter_fit import check_drafter_fits
from wingbeat.runtime.drafters.choice import parse_drafter
from wingbeat.runtime.heads.files import CheckpointError


@pytest.mark.parametrize(("kind", "num_taps"), [("eagle3", 3), ("dflash", 3), ("dspark", 3), ("peagle", 3)])
def test_a_head_that_fits_says_what_it_taps(kind, num_taps, tmp_path):
    made = KINDS[kind](tmp_path)
    assert check_drafter_fits(parse_drafter(made.source, made.target.path), made.target) == num_taps * HIDDEN_SIZE


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "peagle"])
def test_a_head_of_another_vocabulary_does_not_fit(kind, tmp_path):
    made = KINDS[kind](tmp_path)
    file = tmp_path / "head" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 101}))
    with pytest.raises(CheckpointError, match=r"drafter .*head: vocab_size=101 differs from the target's 97"):
        check_drafter_fits(parse_drafter(made.source, made.target.path), made.target)
