"""Keeps log-probabilities and prompt reports of one sequence until an output carries them."""

from collections.abc import Sequence

import numpy as np

from wingbeat.runtime.scheduling.packed_logprobs import PackedLogprobs
from wingbeat.runtime.scheduling.request import SamplingParams, TokenLogprob


class TokenReports:
    """Buffer of one sequence's log-probabilities and report values.

    A settled round fills the buffer before the sequence takes the round's tokens; the output with these tokens empties
    the buffer.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self.prompt_is_out = False
        """Whether an output has carried the prompt's log-probabilities."""
        self._prompt: list[PackedLogprobs] = []
        self._tokens: list[TokenLogprob] = []
        self._rows: list[np.ndarray] = []

    def restart(self) -> None:
        """Clears values that no output has carried, because the sequence is recomputed."""
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
        """Returns the report on the prompt; empty if the request asks for none."""
        report = self._params.report
        return b"" if report is None else report.made_of(self._rows, num_prompt_tokens)

    def add_tokens(self, packed: np.ndarray) -> None:
        """Adds log-probabilities of the tokens that a round emitted, including tokens after the request's end."""
        if self._params.logprobs is not None and len(packed):
            self._tokens += PackedLogprobs.of_round(packed, self._params.logprobs)

    def pop_output(self, num_tokens: int) -> tuple[tuple[TokenLogprob, ...], Sequence[TokenLogprob]]:
        """Returns log-probabilities of an output's `num_tokens` tokens.

        For the first output, also returns log-probabilities of the prompt's tokens.
        """
        tokens, self._tokens = tuple(self._tokens[:num_tokens]), []
        prompt, self._prompt = self._prompt, []
        self.prompt_is_out = True
        return tokens, PackedLogprobs.joined(prompt) if prompt else ()
