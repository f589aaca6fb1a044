"""The extension `rounds`: where each token of an answer came from, and the draft trees, for requests that ask."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from wingbeat.deployments.api.answers.json_pieces import LongList, LongPart
from wingbeat.runtime.scheduling.request import FinishReason, RequestOutput, VerifiedRound
from wingbeat.runtime.text_stream import StreamedText, TextStream
from wingbeat.runtime.tokenizer import Tokenizer

REMEMBERING = frozenset({"suffix"})
"""Drafters whose drafts come from other requests' texts: what of them was rejected is not the asker's to read."""
RoundBody = dict[str, Any]
"""One round as JSON; `docs/http_api.md` has its fields."""


def take_rounds(
    tokenizer: Tokenizer, stream: TextStream, output: RequestOutput, *, hides_rejected: bool
) -> tuple[StreamedText, FinishReason | None, tuple[RoundBody, ...]]:
    """`TextStream.take` token by token, so that each token's share of the text is known; with the rounds it came in.

    Where `hides_rejected`, only the accepted nodes of the trees have tokens.
    """
    finish: FinishReason | None = None
    rounds: list[RoundBody] = []
    for verified in output.rounds:
        texts: list[str] = []
        for place, token_id in enumerate(verified.token_ids, 1):
            is_last = verified is output.rounds[-1] and place == len(verified.token_ids)
            got, finish = stream.take((token_id,), output.finish_reason if is_last else None)
            texts.append(got.text)
            if finish is not None:
                break
        rounds.append(_round_body(tokenizer, verified, texts, hides_rejected))
        if finish is not None:
            break
    if finish is None and output.finish_reason is not None:
        rest, finish = stream.take((), output.finish_reason)
        rounds[-1]["texts"][-1] += rest.text
    text = "".join(text for body in rounds for text in body["texts"])
    num_tokens = sum(len(body["texts"]) for body in rounds)
    return StreamedText(text, num_tokens, finish is FinishReason.STOP), finish, tuple(rounds)


class HeldRounds:
    """Rounds of a request's choices until something is said in which they can go."""

    def __init__(self) -> None:
        self._by_choice: dict[int, list[RoundBody]] = defaultdict(list)

    def hold(self, index: int, rounds: Iterable[RoundBody]) -> None:
        """Keep rounds of one choice."""
        if rounds:
            self._by_choice[index] += rounds

    def hand_over(self, choice: dict[str, Any]) -> None:
        """Give a choice's body the rounds held for it, if there are any."""
        rounds = self._by_choice.pop(choice["index"], None)
        if rounds:
            choice["rounds"] = LongList(LongPart(rounds))


def _round_body(tokenizer: Tokenizer, verified: VerifiedRound, texts: list[str], hides_rejected: bool) -> RoundBody:
    """A round whose first tokens, one for each text, belong to the answer."""
    num_accepted, num_tokens = len(verified.accepted_nodes), len(texts)
    return {
        "token_ids": list(verified.token_ids[:num_tokens]),
        "texts": texts,
        "depths": [index + 1 if index < num_accepted else 0 for index in range(num_tokens)],
        "tree": _tree_body(tokenizer, verified, hides_rejected) if verified.tree_parents else None,
        "plain_reason": verified.plain_reason or None,
    }


def _tree_body(tokenizer: Tokenizer, verified: VerifiedRound, hides_rejected: bool) -> dict[str, Any]:
    token_ids: list[int | None] = list(verified.tree_token_ids)
    if hides_rejected:
        own = {0, *verified.accepted_nodes}
        token_ids = [token_id if node in own else None for node, token_id in enumerate(token_ids)]
    return {
        "token_ids": token_ids,
        "texts": ["" if token_id is None else tokenizer.token_text(token_id) for token_id in token_ids],
        "parents": list(verified.tree_parents),
        "accepted": list(verified.accepted_nodes),
    }
