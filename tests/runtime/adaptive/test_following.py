"""Choice of sequences whose context drafters keep, by the policy's decisions and by count."""

import pytest

from wingbeat.runtime.adaptive.adaptive_speculation import ONE_OF, SURE, Following

pytestmark = pytest.mark.few(6)

BACK = SURE // 4


def after(*rounds):
    """A `Following` after so many rounds in which drafts would pay, or not."""
    subject = Following()
    for pays, count in rounds:
        for _ in range(count):
            subject.decided(pays)
    return subject


@pytest.mark.parametrize(
    ("rounds", "follows_all"),
    [
        ([], True),
        ([(False, SURE - 1)], True),
        ([(False, SURE)], False),
        ([(True, 5000), (False, SURE)], False),
        ([(False, 5000), (True, BACK - 1)], False),
        ([(False, 5000), (True, BACK)], True),
        ([(False, 5000), (True, BACK), (False, SURE - 1)], True),
        ([(False, 5000), (True, BACK // 2), (False, SURE), (True, BACK - 1)], False),
    ],
)
def test_plain_decoding_has_to_win_for_long_and_drafts_for_some_plans(rounds, follows_all):
    assert after(*rounds).follows_all == follows_all


def test_the_first_request_is_followed_and_then_one_of_some_until_drafts_pay():
    subject = after((False, SURE))
    expected = ([True] + [False] * (ONE_OF - 1)) * 3
    assert [subject.takes_next() for _ in range(3 * ONE_OF)] == expected
    for _ in range(BACK):
        subject.decided(True)
    assert all(subject.takes_next() for _ in range(2 * ONE_OF))
    subject.decided(False, SURE)
    assert [subject.takes_next() for _ in range(ONE_OF + 1)] == [True] + [False] * (ONE_OF - 1) + [True]
