"""Random texts of a grammar."""

import numpy as np
from xgrammar import GrammarMatcher

CLOSING = b'"}]'


def walk_text(compiled, texts, rng, most=120):
    """A text that a grammar allows, by random tokens; None where it does not end in time.

    Args:
        texts: of the tokens, by id.
    """
    matcher, mask = GrammarMatcher(compiled), np.zeros((1, -(-compiled.tokenizer_info.vocab_size // 32)), np.int32)
    stops, written = set(compiled.tokenizer_info.stop_token_ids), []
    for step in range(most):
        restricts = matcher.fill_next_token_bitmask(mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits) if restricts else np.arange(len(texts))
        allowed = [token_id for token_id in allowed.tolist() if token_id < len(texts)]
        if not allowed:
            return None
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
        if not matcher.accept_token(token_id):
            return None
        written.append(texts[token_id])
    return None
