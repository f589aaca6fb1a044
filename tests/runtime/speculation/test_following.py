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


def test_one_of_so_many_requests_is_followed_and_the_first_is():
    subject = after((False, _SURE))
    taken = [subject.takes_next() for _ in range(3 * _ONE_OF)]
    assert taken == ([True] + [False] * (_ONE_OF - 1)) * 3
    for _ in range(_BACK):
        subject.decided(True)
    assert all(subject.takes_next() for _ in range(2 * _ONE_OF))


def test_each_probe_that_has_lost_makes_the_way_to_the_next_twice_as_long():
    subject = after((False, _SURE))
    assert subject.takes_next()
    for distance in (2 * _ONE_OF, 4 * _ONE_OF, _MOST_OF, _MOST_OF):
        subject.lost()
        assert subject.patience == distance // _ONE_OF
        assert [subject.takes_next() for _ in range(distance)] == [False] * (distance - 1) + [True]
    for _ in range(_BACK):
        subject.decided(True)
    for _ in range(_SURE):
        subject.decided(False)
    assert [subject.takes_next() for _ in range(_ONE_OF + 1)] == [True] + [False] * (_ONE_OF - 1) + [True]


def test_drafts_that_paid_in_vain_have_to_pay_for_longer_until_they_pay_for_long():
    subject = after((False, _SURE))
    for length in (_BACK, 2 * _BACK, 4 * _BACK):
        for number in range(length):
            assert not subject.follows_all, (length, number)
            subject.decided(True)
        assert subject.follows_all
        subject.decided(False, _SURE)
    for _ in range(8 * _BACK + _SURE):
        subject.decided(True)
    subject.decided(False, _SURE)
    subject.decided(True, _BACK)
    assert subject.follows_all
