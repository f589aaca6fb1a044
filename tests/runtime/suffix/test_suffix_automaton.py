"""The automaton against counting every substring of every text in plain Python."""

from collections import Counter
from random import Random

import pytest

from wingbeat.runtime.suffix import suffix_automaton
from wingbeat.runtime.suffix.suffix_automaton import Cursor, SuffixAutomaton, Text

TEXTS = {
    "loop": [[1] * 40],
    "period": [[1, 2, 3] * 15],
    "binary": [[Random(seed).randrange(2) for _ in range(60)] for seed in range(3)],
    "words": [[token for word in Random(4).choices(["abc", "abd", "cab"], k=20) for token in map(ord, word)]],
    "same": [[5, 6, 7, 8, 9]] * 3,
    "wide": [[Random(6).randrange(9) for _ in range(150)], [3, 3, 4]],
}


def built(texts, chance):
    """All texts in one automaton, their tokens interleaved at random; yields after every token."""
    automaton, ends, so_far = SuffixAutomaton(), [Text()] * len(texts), [[] for _ in texts]
    left = [index for index, text in enumerate(texts) for _ in text]
    chance.shuffle(left)
    for index in left:
        token = texts[index][len(so_far[index])]
        so_far[index].append(token)
        ends[index] = automaton.extend(ends[index], token)
        yield automaton, ends, so_far


def occurrences(texts):
    """Number of occurrences of each substring."""
    return Counter(
        tuple(text[begin:end])
        for text in texts
        for begin in range(len(text))
        for end in range(begin + 1, len(text) + 1)
    )


def followers_of(counts, context):
    return {key[-1]: count for key, count in counts.items() if len(key) == len(context) + 1 and key[:-1] == context}


def walked(automaton, context):
    cursor = Cursor()
    for token in context:
        cursor = automaton.advance(cursor, token)
    return cursor


@pytest.mark.few(3)
@pytest.mark.parametrize("most", [4, 32], ids="at-most-{}".format)
@pytest.mark.parametrize("texts", list(TEXTS.values()), ids=list(TEXTS))
def test_followers_are_counted_as_by_hand(texts, most, monkeypatch):
    monkeypatch.setattr(suffix_automaton, "MAX_CONTEXT_TOKENS", most)
    for step, (automaton, _, so_far) in enumerate(built(texts, Random(1))):
        if step % 13 and step < sum(map(len, texts)) - 1:
            continue
        counts = occurrences(so_far)
        for context in (key for key in counts if len(key) < most):
            cursor = walked(automaton, context)
            assert cursor.length == len(context)
            expected = followers_of(counts, context)
            found = automaton.followers(cursor, most=99)
            scale = sum(expected.values()) + len(expected) / len(context)
            assert {f.token_id: pytest.approx(f.probability * scale) for f in found} == expected
            assert [f.probability for f in found] == sorted((f.probability for f in found), reverse=True)
            assert all(f.cursor == walked(automaton, (*context, f.token_id)) for f in found)
    assert automaton.num_tokens == sum(map(len, texts))
    assert len(automaton._next) <= 2 * automaton.num_tokens + 1


@pytest.mark.few(2)
@pytest.mark.parametrize("texts", list(TEXTS.values()), ids=list(TEXTS))
def test_the_end_of_a_text_is_matched_as_far_back_as_it_occurred_before(texts):
    for automaton, ends, so_far in built(texts, Random(2)):
        counts = occurrences(so_far)
        for end, text in zip(ends, so_far, strict=True):
            endings = [tuple(text[-length:]) for length in range(1, min(len(text), 32) + 1)]
            longest = max((len(key) for key in endings if followers_of_any(counts, key)), default=0)
            assert automaton.longest_followed(end.cursor).length == longest


def followers_of_any(counts, context):
    return counts[context] and any(counts[(*context, token)] for token in range(130))


def test_an_unknown_token_leaves_the_context_it_can_follow():
    automaton, end = SuffixAutomaton(), Text()
    for token in (1, 2, 3, 4, 2, 3):
        end = automaton.extend(end, token)
    assert walked(automaton, (1, 2, 3)).length == 3
    assert walked(automaton, (9, 2, 3)).length == 2
    assert walked(automaton, (2, 3, 9)) == Cursor()


def test_of_equal_counts_the_later_seen_goes_first():
    automaton, end = SuffixAutomaton(), Text()
    for token in (1, 5, 1, 6, 1, 7, 1, 5, 1):
        end = automaton.extend(end, token)
    after = automaton.followers(walked(automaton, (1,)), most=3)
    assert [follower.token_id for follower in after] == [5, 7, 6]


def test_contexts_with_more_followers_than_are_weighed_keep_their_count():
    automaton, end = SuffixAutomaton(), Text()
    for token in range(2, 302):
        end = automaton.extend(automaton.extend(end, 1), token)
    (first, *others) = automaton.followers(walked(automaton, (1,)), most=500)
    assert len(others) == suffix_automaton.MAX_FOLLOWERS - 1
    # 300 times something followed, each time something else: all but half is left to what was never seen.
    assert first.probability == pytest.approx(1 / (300 + 300))


def test_shorter_ends_add_what_longer_ones_leave_room_for():
    automaton, end = SuffixAutomaton(), Text()
    for token in (1, 2, 3, 9, 2, 4, 8, 2, 4, 7, 1, 2):
        end = automaton.extend(end, token)
    # 3 came after (1, 2), once; after (2) alone came 4 twice and 3 once.
    longer, shorter = 1 / (1 + 1 / 2), 2 / (3 + 2)
    found = automaton.continuations(end.cursor, most=5)
    assert {f.token_id: f.probability for f in found} == pytest.approx({3: longer, 4: (1 - longer) * shorter})
    assert [f.cursor.length for f in found] == [3, 2]
    assert [f.token_id for f in automaton.continuations(end.cursor, most=1)] == [3]
    assert automaton.continuations(Cursor(), most=5) == []


@pytest.mark.parametrize("texts", list(TEXTS.values()), ids=list(TEXTS))
def test_continuations_are_different_and_share_one_certainty(texts):
    for automaton, ends, _ in built(texts, Random(3)):
        for end in ends:
            found = automaton.continuations(end.cursor, most=6)
            assert len({f.token_id for f in found}) == len(found) <= 6
            assert sum(f.probability for f in found) < 1
            assert [f.cursor.length for f in found] == sorted((f.cursor.length for f in found), reverse=True)


def test_the_likeliest_follower_is_the_first_of_all():
    generator = Random(3)
    for width in (2, 5, 80):
        automaton, text = SuffixAutomaton(), Text()
        for _ in range(600):
            text = automaton.extend(text, generator.randrange(width))
            first = automaton.longest_followers(text.cursor, 1)
            assert automaton.likeliest(text.cursor) == (first[0] if first else None)
