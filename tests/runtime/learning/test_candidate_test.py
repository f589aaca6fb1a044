"""Which held-out requests a candidate is tested on, in which order, and in which groups."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from tests.runtime.recordings.test_ring import SPEC, Clock, ring_of, sequence, written
from wingbeat.runtime.learning import candidate_test
from wingbeat.runtime.learning.candidate_test import CandidateTest
from wingbeat.runtime.learning.shadow import Drafted
from wingbeat.runtime.learning.text_groups import LEAST_TEXTS, MOST_GROUPS, TextGroups, histogram
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


def test_requests_are_judged_in_the_groups_of_their_texts(tmp_path, drafted_for, monkeypatch):
    monkeypatch.setattr("wingbeat.runtime.learning.text_groups.LEAST_TEXTS", 3)
    ring = ring_of(tmp_path, Clock(), PLENTY)
    # Texts of neighbouring tokens: numbers near 0 and near 500 have none in common.
    low, high = ([n for n in held(60) if n < 40], [n for n in held(60, 500) if n < 540])
    assert min(len(low), len(high)) >= 3
    written(ring, [*low, *high])
    test, seen = started(ring), {}
    see = test.gate.see
    monkeypatch.setattr(
        test.gate, "see", lambda new, old, group: (seen.update({drafted_for[-1]: group}), see(new, old))
    )
    while not test.done:
        test.see_next()
    groups = [{seen[number] for number in numbers} for numbers in (low, high)]
    assert not groups[0] & groups[1]


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
    groups = TextGroups(torch.stack([histogram(text) for text in tokens]))
    return groups, [groups.of(text) for text in tokens]


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
    groups = TextGroups(torch.stack([histogram(text) for text in tokens]) if counts else torch.zeros(0, 1024))
    assert groups.count == 1
    assert groups.of(torch.tensor([1, 2, 3])) == 0


def test_no_group_is_too_small_to_be_judged():
    tokens, _ = texts((300, 5, 3, 40))
    groups, found = grouped(tokens)
    assert groups.count > 1
    assert min(Counter(found).values()) >= LEAST_TEXTS
