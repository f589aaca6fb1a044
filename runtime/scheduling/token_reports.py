"""Log-probabilities of one sequence's tokens, between the round that found them and the output that carries them."""

import numpy as np

from wingbeat.runtime.scheduling.request import SamplingParams, TokenLogprob


def unpack_logprobs(packed: np.ndarray, num_top: int) -> list[TokenLogprob]:
    """Rows of what `wingbeat.runtime.verifier.choices.logprobs.token_logprobs` packed: int64 [num_rows, 1 + 2 * most].

    Args:
        num_top: most likely tokens to keep of each row.
    """
    most = packed.shape[1] // 2
    numbers = np.ascontiguousarray(packed).view(np.float64)
    chosen, ids = numbers[:, 0].tolist(), packed[:, 1 : 1 + num_top].tolist()
    top = numbers[:, 1 + most : 1 + most + num_top].tolist()
    return [
        TokenLogprob(logprob, tuple(zip(row_ids, row, strict=True)))
        for logprob, row_ids, row in zip(chosen, ids, top, strict=True)
    ]


class TokenReports:
    """Filled as a round is settled, before the sequence takes its tokens; emptied by the output of these tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self.prompt_is_out = False
        """Whether an output has carried the prompt's."""
        self._prompt: list[TokenLogprob] = []
        self._tokens: list[TokenLogprob] = []

    def restart(self) -> None:
        """The sequence is computed again: what no output has carried is found again."""
        self._tokens = []
        if not self.prompt_is_out:
            self._prompt = []

    def add_prompt(self, packed: np.ndarray) -> None:
        """Of the prompt tokens that follow those so far; see `unpack_logprobs`."""
        if len(packed):
            self._prompt += unpack_logprobs(packed, self._params.prompt_logprobs)

    def add_tokens(self, packed: np.ndarray) -> None:
        """Of the tokens a round emitted, those included that the request does not keep."""
        if self._params.logprobs is not None and len(packed):
            self._tokens += unpack_logprobs(packed, self._params.logprobs)

    def take(self, num_tokens: int) -> tuple[tuple[TokenLogprob, ...], tuple[TokenLogprob, ...]]:
        """For an output of so many tokens: theirs, and the prompt's where it is the first one."""
        tokens, self._tokens = tuple(self._tokens[:num_tokens]), []
        prompt, self._prompt = tuple(self._prompt), []
        self.prompt_is_out = True
        return tokens, prompt
