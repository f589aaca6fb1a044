"""Whose context drafters keep: by what was decided, and by count."""

import pytest

from wingbeat.runtime.speculation.following import _BACK, _MOST_OF, _ONE_OF, _SURE, Following

pytestmark = pytest.mark.few(6)


def after(*rounds):
    """One that saw so many rounds in which drafts would pay, or not."""
    subject = Following()
    for pays, count in rounds:
        for _ in range(count):
            subject.decided(pays)
    return subject


@pytest.mark.parametrize(
    ("rounds", "follows_all"),
    [
        ([], True),
        ([(False, _SURE - 1)], True),
        ([(False, _SURE)], False),
        ([(True, 5000), (False, _SURE)], False),
        ([(False, 5000), (True, _BACK - 1)], False),
        ([(False, 5000), (True, _BACK)], True),
        ([(False, 5000), (True, _BACK), (False, _SURE - 1)], True),
        ([(False, 5000), (True, _BACK // 2), (False, _SURE), (True, _BACK - 1)], False),
    ],
)
def test_plain_decoding_has_to_win_for_long_and_drafts_for_one_plans_hold(rounds, follows_all):
    assert after(*rounds).follows_all == follows_all


def test_the_first_request_is_followed_and_then_ever_fewer_until_drafts_pay():
    subject = after((False, _SURE))
    assert subject.takes_next()
    assert subject.patience == 1
    for distance in (_ONE_OF, 2 * _ONE_OF, 4 * _ONE_OF, _MOST_OF, _MOST_OF):
        assert [subject.takes_next() for _ in range(distance)] == [False] * (distance - 1) + [True]
    assert subject.patience == _MOST_OF // _ONE_OF
    for _ in range(_BACK):
        subject.decided(True)
    assert all(subject.takes_next() for _ in range(2 * _ONE_OF))
    subject.decided(False, _SURE)
    assert [subject.takes_next() for _ in range(_ONE_OF + 1)] == [True] + [False] * (_ONE_OF - 1) + [True]
