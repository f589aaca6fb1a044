"""Log-probabilities and prompt reports of one sequence, from the round that computed them to their output."""

from collections.abc import Sequence

import numpy as np

from wingbeat.runtime.scheduling.packed_logprobs import PackedLogprobs
from wingbeat.runtime.scheduling.request import SamplingParams, TokenLogprob


class TokenReports:
    """Buffer, filled when a round is settled, before the sequence takes its tokens, and emptied by their output."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self.prompt_is_out = False
        """Whether an output has carried the prompt's log-probabilities."""
        self._prompt: list[PackedLogprobs] = []
        self._tokens: list[TokenLogprob] = []
        self._rows: list[np.ndarray] = []

    def restart(self) -> None:
        """Clears values that no output has carried; the sequence is recomputed."""
        self._tokens, self._rows = [], []
        if not self.prompt_is_out:
            self._prompt = []

    def add_prompt(self, packed: np.ndarray) -> None:
        """Adds log-probabilities of the next prompt tokens; see `PackedLogprobs.of_round`."""
        if len(packed):
            self._prompt.append(PackedLogprobs.of_round(packed, self._params.prompt_logprobs))

    def add_row(self, row: np.ndarray) -> None:
        """Adds the row of the next prompt chunk: float64 [n], in the layout of the request's `PromptReport`."""
        self._rows.append(row.copy())

    def of_prompt(self, num_prompt_tokens: int) -> bytes:
        """Report on the prompt; empty if the request has none."""
        report = self._params.report
        return b"" if report is None else report.made_of(self._rows, num_prompt_tokens)

    def add_tokens(self, packed: np.ndarray) -> None:
        """Adds log-probabilities of the tokens that a round emitted, including those that the request does not keep."""
        if self._params.logprobs is not None and len(packed):
            self._tokens += PackedLogprobs.of_round(packed, self._params.logprobs)

    def take(self, num_tokens: int) -> tuple[tuple[TokenLogprob, ...], Sequence[TokenLogprob]]:
        """Log-probabilities for an output of `num_tokens` tokens, and the prompt's if it is the first output."""
        tokens, self._tokens = tuple(self._tokens[:num_tokens]), []
        prompt, self._prompt = self._prompt, []
        self.prompt_is_out = True
        return tokens, PackedLogprobs.joined(prompt) if prompt else ()
