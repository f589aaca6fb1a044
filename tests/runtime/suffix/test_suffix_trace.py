"""Rounds that are shown hide what suffix drafts took from other requests."""

from dataclasses import replace

from tests.deployments.api.answers.test_round_trace import TRACE, TracedPool
from tests.deployments.http_world import TOKENIZER, complete


def test_drafts_from_other_requests_texts_are_shown_only_where_they_were_accepted():
    pool = TracedPool("abc", 3)
    pool.info = replace(pool.info, drafts_from_other_requests=True)
    (choice,) = complete(pool, speculation=TRACE).json()["choices"]
    tree = choice["rounds"][0]["tree"]
    assert tree["token_ids"] == [7, None, *TOKENIZER.encode("ab")]
    assert tree["texts"] == [TOKENIZER.decode([7]), "", "a", "b"]
    assert tree["parents"] == [-1, 0, 0, 2]
