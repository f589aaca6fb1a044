"""Held-out requests on which a candidate is tested: choice, order and groups."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from tests.runtime.recordings.test_ring import SPEC, Clock, ring_of, sequence, written
from wingbeat.runtime.learning import candidate_test
from wingbeat.runtime.learning.candidate_test import CandidateTest
from wingbeat.runtime.learning.shadow import Drafted
from wingbeat.runtime.learning.text_groups import LEAST_TEXTS, MOST_GROUPS, WIDTH, TextGroups, histogram
from wingbeat.runtime.recordings.ring import is_held_out

KINDS = 3
PLENTY = 10**8


def held(count, start=0):
    """Numbers of requests that are held out."""
    found = (number for number in range(start, start + 100 * count) if is_held_out(sequence(number)))
    return [next(found) for _ in range(count)]


@pytest.fixture
def drafted_for(monkeypatch):
    """Numbers of the requests that were drafted for, by the candidate."""
    found = []

    def draft(family, head, record, chain, columns):
        if head.is_candidate:
            found.append(int(record.taps[0, 0]))
        return Drafted({0: 10}, {0: 30})

    monkeypatch.setattr(candidate_test, "draft_in_shadow", draft)
    return found


def started(ring):
    heads = tuple(SimpleNamespace(tap_layers=SPEC.tap_layers, is_candidate=is_it) for is_it in (True, False))
    return CandidateTest(1, 0.02, 0, heads, SimpleNamespace(family=None, chain=5), ring)


def test_the_newest_requests_are_drafted_for_first_and_what_comes_in_goes_before_them(tmp_path, drafted_for):
    ring = ring_of(tmp_path, Clock(), PLENTY)
    old, new = held(5), held(3, 5000)
    written(ring, old)
    test = started(ring)
    test.see_next()
    written(ring, new)
    test.renew()
    while not test.done:
        test.see_next()
    assert drafted_for == [old[-1], *reversed(new), *reversed(old[:-1])]
    assert test.gate.num_requests == len(old) + len(new)


def test_the_oldest_requests_make_room(tmp_path, drafted_for, monkeypatch):
    monkeypatch.setattr(candidate_test, "MOST_HELD", 4)
    ring, numbers = ring_of(tmp_path, Clock(), PLENTY), held(7)
    written(ring, numbers)
    test = started(ring)
    while not test.done:
        test.see_next()
    assert drafted_for == numbers[:2:-1]


@pytest.fixture
def two_kinds(monkeypatch):
    """Requests of two kinds that have no token in common, where groups of three are judged."""
    monkeypatch.setattr("wingbeat.runtime.learning.text_groups.LEAST_TEXTS", 3)
    return [number for number in held(60) if number < 40], [number for number in held(60, 500) if number < 540]


def test_requests_are_judged_in_the_groups_of_their_texts(tmp_path, drafted_for, two_kinds, monkeypatch):
    ring, seen = ring_of(tmp_path, Clock(), PLENTY), {}
    written(ring, [*two_kinds[0], *two_kinds[1]])
    test = started(ring)
    monkeypatch.setattr(test.gate, "see", lambda new, old, group: seen.update({drafted_for[-1]: group}))
    while not test.done:
        test.see_next()
    low, high = ({seen[number] for number in numbers} - {None} for numbers in two_kinds)
    assert low
    assert high
    assert not low & high


def texts(counts, length=200):
    """Texts of kinds that share half of their tokens; and the kind of each."""
    torch.manual_seed(3)
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    order = torch.randperm(len(kinds)).tolist()
    kinds = [kinds[index] for index in order]
    common = torch.randint(0, 50, (len(kinds), length // 2))
    own = torch.stack([torch.randint(0, 100, (length // 2,)) + 100 * (kind + 1) for kind in kinds])
    return torch.cat([common, own], dim=1), kinds


def grouped(tokens):
    histograms = [histogram(text) for text in tokens]
    groups = TextGroups(torch.stack(histograms))
    return groups, [groups.find_group(text) for text in histograms]


def test_kinds_of_text_become_groups():
    tokens, kinds = texts((150, 40, 60))
    groups, found = grouped(tokens)
    assert KINDS <= groups.count <= MOST_GROUPS
    for kind in range(KINDS):
        own = {group for group, of in zip(found, kinds, strict=True) if of == kind}
        others = {group for group, of in zip(found, kinds, strict=True) if of != kind}
        assert not own & others, "no group has two kinds"
    assert grouped(tokens)[1] == found, "the same texts have the same groups"


@pytest.mark.parametrize("counts", [(), (1,), (LEAST_TEXTS,), (LEAST_TEXTS, LEAST_TEXTS - 1)], ids=str)
def test_few_texts_are_one_group(counts):
    tokens, _ = texts(counts) if counts else (torch.zeros(0, 200, dtype=torch.long), [])
    groups = TextGroups(torch.stack([histogram(text) for text in tokens]) if counts else torch.zeros(0, WIDTH))
    assert groups.count == 1
    assert groups.find_group(histogram(torch.tensor([1, 2, 3]))) == 0


def test_texts_of_a_small_group_are_judged_in_none_and_are_not_among_those_of_others():
    tokens, kinds = texts((40, 6))
    groups, found = grouped(tokens)
    assert {group for group, kind in zip(found, kinds, strict=True) if kind == 1} == {None}
    of_others = Counter(group for group, kind in zip(found, kinds, strict=True) if kind == 0)
    assert groups.count >= 1
    assert sum(count for group, count in of_others.items() if group is not None) >= LEAST_TEXTS


def test_groups_are_found_anew_as_requests_come_in_and_what_was_seen_counts_in_them(tmp_path, drafted_for, two_kinds):
    ring, (low, high) = ring_of(tmp_path, Clock(), PLENTY), two_kinds
    written(ring, low[:3])
    test = started(ring)
    while not test.done:
        test.see_next()
    assert test.gate.num_groups == 1
    written(ring, [*low[3:], *high])
    test.renew()
    assert test.gate.num_groups > 1
    assert test.gate.num_requests == 3
    while not test.done:
        test.see_next()
    assert len(drafted_for) == test.gate.num_requests == len(low) + len(high)
