"""A head of another verifier is refused; the message names both verifiers as far as the files allow."""

import pytest

from tests.runtime.heads.head_folder import HIDDEN, edit_config, load, target_of
from wingbeat.runtime.belonging.another_verifier import another_verifier
from wingbeat.runtime.heads.load import CheckpointError

GIVEN = target_of(160, 24, 4096)


@pytest.mark.parametrize(
    ("raw", "shapes", "words"),
    [
        (
            {"vocab_size": 128256, "hidden_size": 4096},
            {"fc.weight": (4096, 12288)},
            "one of hidden size 4096 and 128256 words; this one has hidden size 160 and 4096 words",
        ),
        ({"target_hidden_size": 64}, {}, "one of hidden size 64; this one has hidden size 160"),
        ({"vocab_size": 5}, {"t2d": (7,)}, "one of 7 words; this one has 4096 words"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]},
            {"fc.weight": (160, 480)},
            "one of at least 34 layers; this one has 24 layers",
        ),
        (
            {
                "transformer_layer_config": {"vocab_size": 9},
                "speculators_config": {"verifier": {"name_or_path": "org/base"}},
            },
            {},
            "org/base, of 9 words; this one has 4096 words",
        ),
        (
            {"dflash_config": {"target_hidden_size": 64, "target_layer_ids": [1, 30]}, "num_target_layers": 36},
            {},
            "one of hidden size 64 and 36 layers; this one has hidden size 160 and 24 layers",
        ),
    ],
    ids=["width and words", "stated width", "token map", "deep taps", "named", "one-pass"],
)
def test_what_the_files_tell_of_another_verifier_is_said(raw: dict, shapes: dict, words: str):
    assert another_verifier(raw, shapes, GIVEN) == f"the head belongs to another verifier, {words}"


def test_a_head_of_this_verifier_and_one_that_tells_nothing_are_not_called_another_ones():
    fits = {"vocab_size": 4096, "eagle_aux_hidden_state_layer_ids": [1, 11, 20]}
    assert another_verifier(fits, {"fc.weight": (160, 480)}, GIVEN) is None
    assert another_verifier({}, {}, GIVEN, is_eagle1=True) is None


@pytest.mark.parametrize("hidden", [HIDDEN // 2, HIDDEN * 2])
def test_another_verifiers_head_is_called_so_where_it_is_loaded(folder, hidden: int):
    edit_config(folder, drop=("target_hidden_size",))
    words = f"the head belongs to another verifier, one of hidden size {HIDDEN}; this one has hidden size {hidden}: "
    with pytest.raises(CheckpointError, match=words):
        load(folder, hidden_size=hidden)
