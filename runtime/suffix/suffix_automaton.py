"""A suffix automaton that counts: which tokens followed a context, and how often. Knows tokens, not requests.

Each state stands for contexts (substrings) that end at the same places of the text, so n tokens need at most 2 n states
and one more token costs amortised constant time. Several texts share one automaton, each extended at its own end
(Blumer et al., The smallest automaton recognizing the subwords of a text, 1985; generalised to several texts).

Plain Python, on purpose: a token's work is a handful of dictionary look-ups that depend on one another, which tensors
would only make slower.
"""

from itertools import islice
from operator import itemgetter
from typing import NamedTuple

MAX_CONTEXT_TOKENS = 32
"""Longest context that is counted and matched. Longer ones predict hardly better, and counting a token costs at most
this many steps, whatever the text repeats."""
MAX_FOLLOWERS = 64
"""Followers of a context that are weighed: the first ones seen, so those that keep coming are among them."""

_ROOT = 0


class Cursor(NamedTuple):
    """A place of an automaton: a context and the state it belongs to."""

    state: int = _ROOT
    length: int = 0
    """Tokens of the context, at most MAX_CONTEXT_TOKENS."""


class Follower(NamedTuple):
    """A token that came after a context."""

    token_id: int
    probability: float
    """Estimated; those of all followers sum to less than 1."""
    share: float
    """Share of the context's followed occurrences that this token followed."""
    cursor: Cursor
    """The context and this token."""


class Text(NamedTuple):
    """The end of one of the texts, where its next token goes."""

    last: int = _ROOT
    cursor: Cursor = Cursor()


class SuffixAutomaton:
    """Contexts of some texts, with counts."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        """State of the longest context that ends in more places."""
        self._length: list[int] = [0]
        """Of a state's longest context."""
        self._count: list[int] = [0]
        """Places where a state's contexts end; kept for contexts of up to MAX_CONTEXT_TOKENS tokens."""
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
        """The longest end of (context, token) that some text holds."""
        state, length = self._normal(cursor)
        while token_id not in self._next[state]:
            state = self._link[state]
            if state < _ROOT:
                return Cursor()
            length = self._length[state]
        return self._step(Cursor(state, length), token_id)

    def longest_followed(self, cursor: Cursor) -> Cursor:
        """The longest end of the context that has followers; empty where none has."""
        state, length = self._normal(cursor)
        while not self._next[state] and state > _ROOT:
            state = self._link[state]
            length = self._length[state]
        return Cursor(state, length)

    def continuations(self, cursor: Cursor, most: int) -> list[Follower]:
        """The likeliest tokens after the longest end of a context that has followers; where these are fewer than
        `most`, what shorter ends add, as likely as the longer ones leave room for.
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
        """The likeliest tokens after the longest end of a context that has followers."""
        return self.followers(self.longest_followed(cursor), most)

    def followers(self, cursor: Cursor, most: int) -> list[Follower]:
        """The likeliest tokens after a context, likeliest first, of equals the one first seen later; none after an
        empty context.

        The estimate is PPM's, method C, with the escape made rarer by the context's length: a context of `length`
        tokens that n tokens followed, d of them different, leaves d / length to what was never seen, so that
        P(token) = its count / (n + d / length).
        """
        # With its follower a context must still be one that is counted.
        state, length = self._normal(Cursor(cursor.state, min(cursor.length, MAX_CONTEXT_TOKENS - 1)))
        following, count = self._next[state], self._count
        if not following or not length:
            return []
        counted = [(count[to], token_id, to) for token_id, to in islice(following.items(), MAX_FOLLOWERS)]
        if len(counted) > 1:
            # The sort is stable: of equals, the one inserted last comes first.
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
        """The first of `longest_followers`; None where there is none."""
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
            if seen >= best:  # of equals, the one seen last
                best, token_id, to = seen, follower, target
        if len(following) > MAX_FOLLOWERS:
            total = max(total, count[state])
        probability = best * (1.0 / (total + len(following) / length))
        return Follower(token_id, probability, best / total, self._capped(to, length + 1))

    def _append(self, last: int, token_id: int) -> int:
        """The state of a whole text, one token longer."""
        following, link, length = self._next, self._link, self._length
        known = following[last].get(token_id)
        if known is not None:  # another text goes on like this one
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
        """Give the contexts of `known` that are no longer than (`state`, token) a state of their own."""
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
        """(context, token), which some text must hold, cut to what is counted."""
        state, length = self._normal(cursor)
        return self._capped(self._next[state][token_id], length + 1)

    def _capped(self, state: int, length: int) -> Cursor:
        return self._normal(Cursor(state, min(length, MAX_CONTEXT_TOKENS)))

    def _normal(self, cursor: Cursor) -> Cursor:
        """The state a context belongs to now: splits and cuts move it to one behind a link."""
        state, length = cursor
        link = self._link
        while state > _ROOT and self._length[link[state]] >= length:
            state = link[state]
        return Cursor(state, length)
