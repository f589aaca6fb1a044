"""Walks through a grammar: given texts, and random texts."""

import numpy as np

from wingbeat.runtime.grammar.grammar_masker import fill_row

CLOSING = b'"}]'


def taken(grammar, text):
    """Number of a text's tokens that a grammar takes, number of all its tokens, and whether the grammar is complete."""
    matcher, token_ids = grammar.matcher(), grammar.vocabulary.encode(text)
    return matcher.try_consume_tokens(token_ids), len(token_ids), matcher.is_accepting()


def accepts(grammar, text):
    """Whether a grammar accepts a text from beginning to end."""
    num_taken, num_tokens, is_whole = taken(grammar, text)
    return num_taken == num_tokens and is_whole


def allowed_tokens(matcher, vocabulary):
    """The ids that a matcher allows next, sorted."""
    mask = np.zeros((1, vocabulary.num_words), np.int32)
    fill_row(matcher, mask, 0)
    assert not matcher.is_error(), matcher.get_error()
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk_text(grammar, rng, most=120):
    """Random text that a grammar allows; None if the text does not end in time."""
    matcher, vocabulary, written = grammar.matcher(), grammar.vocabulary, []
    texts, stops = vocabulary.texts, vocabulary.stop_token_ids
    for step in range(most):
        allowed = allowed_tokens(matcher, vocabulary)
        may_end = bool(stops.intersection(allowed))
        if may_end and (rng.random() < 0.3 or step > most // 4):
            return b"".join(written).decode(errors="replace")
        some = [token_id for token_id in rng.sample(allowed, min(len(allowed), 40)) if token_id not in stops]
        if step > most // 4:
            ends = [token_id for token_id in allowed if texts[token_id][-1:] and texts[token_id][-1] in CLOSING]
            some = ends[:40] or some
        if not some:
            return b"".join(written).decode(errors="replace")
        token_id = rng.choice(some)
        assert matcher.consume_token(token_id), matcher.get_error()
        written.append(texts[token_id])
    return None
