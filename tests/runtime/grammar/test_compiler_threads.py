"""Several threads compile grammars for one engine at once, while the grammars of others are in use."""

import random
import threading

from tests.runtime.grammar.walks import walk_text
from wingbeat.runtime.scheduling.request import GrammarSpec


def test_threads_compile_and_follow_grammars_at_once(grammars):
    """Each thread drops its grammars while others make theirs, as requests that come and go do."""
    failures, texts = [], []

    def work(number):
        rng = random.Random(number)
        try:
            for _ in range(60):
                length = rng.randrange(1, 9)
                grammar = grammars.compile(GrammarSpec("regex", f"[a-z]{{{length}}}"))
                texts.append((walk_text(grammar, rng), length))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(texts) == 360
    assert all(len(text) == length for text, length in texts if text is not None)
