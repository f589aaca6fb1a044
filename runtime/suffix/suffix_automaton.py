"""A counting suffix automaton: which tokens followed a context, and how often.

The automaton holds only tokens and counts, nothing about requests.

A state stands for all contexts (substrings) that end at the same positions of the text, so n tokens need at most 2 n
states, and appending a token takes amortised constant time. An automaton can contain several texts, each of which is
extended at its own end (Blumer et al., The smallest automaton recognizing the subwords of a text, 1985; generalised to
several texts).

This is plain Python because appending a token is a few dictionary look-ups, each of which needs the result of the one
before; tensors would only be slower.
"""

from itertools import islice
from operator import itemgetter
from typing import NamedTuple

MAX_CONTEXT_TOKENS = 32
"""Maximum length in tokens of contexts that are counted and matched.

Longer contexts hardly predict better. The limit also bounds the number of steps that counting a token takes in
repetitive texts.
"""
MAX_FOLLOWERS = 64
"""Maximum number of followers of a context that are considered. The followers that occurred first are considered,
because frequent followers usually occur early.
"""

_ROOT = 0


class Cursor(NamedTuple):
    """A position in an automaton: a context and its state."""

    state: int = _ROOT
    length: int = 0
    """Number of tokens in the context, at most MAX_CONTEXT_TOKENS."""


class Follower(NamedTuple):
    """A token that followed a context."""

    token_id: int
    probability: float
    """Estimated probability; the probabilities of all followers sum to less than 1."""
    share: float
    """Share of the context's occurrences in which this token followed; occurrences at the end of a text are not
    counted.
    """
    cursor: Cursor
    """Position of the context with this token appended."""


class Text(NamedTuple):
    """The end of one text, where its next token is appended."""

    last: int = _ROOT
    cursor: Cursor = Cursor()


class SuffixAutomaton:
    """The contexts of several texts, with the number of their occurrences."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        """Suffix link by state: the state of the longest suffix that ends at more positions."""
        self._length: list[int] = [0]
        """Number of tokens of the longest context, by state."""
        self._count: list[int] = [0]
        """Number of positions at which the contexts end, by state; only contexts of up to MAX_CONTEXT_TOKENS tokens are
        counted.
        """
        self.num_tokens = 0

    def extend(self, text: Text, token_id: int) -> Text:
        """Append a token to a text; returns the text's new end."""
        last = self._append(text.last, token_id)
        cursor = self._step(text.cursor, token_id)
        state, count, link = cursor.state, self._count, self._link
        while state > _ROOT:
            count[state] += 1
            state = link[state]
        self.num_tokens += 1
        return Text(last, cursor)

    def advance(self, cursor: Cursor, token_id: int) -> Cursor:
        """Cursor at the longest suffix of (context, token) that occurs in some text."""
        state, length = self._normal(cursor)
        while token_id not in self._next[state]:
            state = self._link[state]
            if state < _ROOT:
                return Cursor()
            length = self._length[state]
        return self._step(Cursor(state, length), token_id)

    def longest_followed(self, cursor: Cursor) -> Cursor:
        """Cursor at the longest suffix of the context that has followers; at the empty context if there is no such
        suffix.
        """
        state, length = self._normal(cursor)
        while not self._next[state] and state > _ROOT:
            state = self._link[state]
            length = self._length[state]
        return Cursor(state, length)

    def continuations(self, cursor: Cursor, most: int) -> list[Follower]:
        """The likeliest tokens after the longest suffix of a context that has followers.

        Shorter suffixes contribute only if the longer suffixes have fewer than `most` followers. Probabilities from a
        shorter suffix are multiplied by 1 minus the sum of the followers' probabilities at the longer suffixes.
        """
        found: dict[int, Follower] = {}
        left = 1.0
        cursor = self.longest_followed(cursor)
        while cursor.length and len(found) < most:
            followers = self.followers(cursor, most)
            for follower in followers:
                if follower.token_id not in found:
                    found[follower.token_id] = follower._replace(probability=left * follower.probability)
            left *= 1.0 - sum(follower.probability for follower in followers)
            shorter = self._link[cursor.state]
            cursor = self.longest_followed(Cursor(shorter, self._length[shorter]))
        return list(found.values())[:most]

    def longest_followers(self, cursor: Cursor, most: int) -> list[Follower]:
        """The likeliest tokens after the longest suffix of a context that has followers."""
        return self.followers(self.longest_followed(cursor), most)

    def followers(self, cursor: Cursor, most: int) -> list[Follower]:
        """The likeliest tokens after a context, likeliest first. Among tokens with equal counts, the token that was
        added to the context's followers last comes first.

        The list is empty for an empty context.

        Probabilities are estimated by PPM's method C, with a share for unseen tokens that shrinks with the context's
        length. In a context of `length` tokens with n followed occurrences and d distinct followers, unseen tokens
        count as d / length occurrences, so that P(token) = count of the token / (n + d / length).
        """
        # The context is shortened so that the context with a follower appended is still short enough to be counted.
        state, length = self._normal(Cursor(cursor.state, min(cursor.length, MAX_CONTEXT_TOKENS - 1)))
        following, count = self._next[state], self._count
        if not following or not length:
            return []
        counted = [(count[to], token_id, to) for token_id, to in islice(following.items(), MAX_FOLLOWERS)]
        if len(counted) > 1:
            # The sort is stable, so among equal counts the follower that was inserted last comes first.
            counted.reverse()
            counted.sort(key=itemgetter(0), reverse=True)
        total = sum(entry[0] for entry in counted)
        if len(following) > MAX_FOLLOWERS:
            total = max(total, count[state])
        scale = 1.0 / (total + len(following) / length)
        return [
            Follower(token_id, seen * scale, seen / total, self._capped(to, length + 1))
            for seen, token_id, to in counted[:most]
        ]

    def likeliest(self, cursor: Cursor) -> Follower | None:
        """The first entry of `longest_followers`, found without building the list; None if the list is empty."""
        link, lengths, count, next_of = self._link, self._length, self._count, self._next
        state, length = self._normal(cursor)
        following = next_of[state]
        while not following and state > _ROOT:
            state = link[state]
            length, following = lengths[state], next_of[state]
        if length >= MAX_CONTEXT_TOKENS:
            length = MAX_CONTEXT_TOKENS - 1
            state, _ = self._normal(Cursor(state, length))
            following = next_of[state]
        if not following or not length:
            return None
        best = total = 0
        token_id = to = _ROOT
        for follower, target in islice(following.items(), MAX_FOLLOWERS):
            seen = count[target]
            total += seen
            if seen >= best:  # among equal counts, the follower inserted last wins
                best, token_id, to = seen, follower, target
        if len(following) > MAX_FOLLOWERS:
            total = max(total, count[state])
        probability = best * (1.0 / (total + len(following) / length))
        return Follower(token_id, probability, best / total, self._capped(to, length + 1))

    def _append(self, last: int, token_id: int) -> int:
        """Appends a token to a text, without counting; returns the text's new state."""
        following, link, length = self._next, self._link, self._length
        known = following[last].get(token_id)
        if known is not None:  # another text already continues with this token
            return known if length[known] == length[last] + 1 else self._split(last, token_id, known)
        new = self._new_state({}, _ROOT, length[last] + 1, 0)
        state = last
        while state >= _ROOT and token_id not in following[state]:
            following[state][token_id] = new
            state = link[state]
        if state >= _ROOT:
            known = following[state][token_id]
            link[new] = known if length[known] == length[state] + 1 else self._split(state, token_id, known)
        return new

    def _split(self, state: int, token_id: int, known: int) -> int:
        """Splits a state: makes a new state for those contexts of `known` that are at most as long as (`state`,
        token).
        """
        following, link = self._next, self._link
        clone = self._new_state(dict(following[known]), link[known], self._length[state] + 1, self._count[known])
        link[known] = clone
        while state >= _ROOT and following[state].get(token_id) == known:
            following[state][token_id] = clone
            state = link[state]
        return clone

    def _new_state(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        return len(self._next) - 1

    def _step(self, cursor: Cursor, token_id: int) -> Cursor:
        """Cursor at (context, token), which must occur in some text, shortened to the counted length."""
        state, length = self._normal(cursor)
        return self._capped(self._next[state][token_id], length + 1)

    def _capped(self, state: int, length: int) -> Cursor:
        return self._normal(Cursor(state, min(length, MAX_CONTEXT_TOKENS)))

    def _normal(self, cursor: Cursor) -> Cursor:
        """Returns the cursor with the state to which the context belongs now. After a split or a shortening, that state
        is reached by suffix links.
        """
        state, length = cursor
        link = self._link
        while state > _ROOT and self._length[link[state]] >= length:
            state = link[state]
        return Cursor(state, length)
