"""Reports on one sequence's tokens, between the round that found it and the output that carries it."""

from collections.abc import Sequence

import numpy as np

from wingbeat.runtime.scheduling.packed_logprobs import PackedLogprobs
from wingbeat.runtime.scheduling.request import SamplingParams, TokenLogprob


class TokenReports:
    """Filled as a round is settled, before the sequence takes its tokens; emptied by the output of these tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self.prompt_is_out = False
        """Whether an output has carried the prompt's."""
        self._prompt: list[PackedLogprobs] = []
        self._tokens: list[TokenLogprob] = []
        self._rows: list[np.ndarray] = []

    def restart(self) -> None:
        """The sequence is computed again: what no output has carried is found again."""
        self._tokens, self._rows = [], []
        if not self.prompt_is_out:
            self._prompt = []

    def add_prompt(self, packed: np.ndarray) -> None:
        """Of the prompt tokens that follow those so far; see `PackedLogprobs.of_round`."""
        if len(packed):
            self._prompt.append(PackedLogprobs.of_round(packed, self._params.prompt_logprobs))

    def add_row(self, row: np.ndarray) -> None:
        """Add the row of the next chunk of the prompt: float64 [n], as its `PromptReport` reads it."""
        self._rows.append(row.copy())

    def of_prompt(self, num_prompt_tokens: int) -> bytes:
        """Report on the prompt; empty where the request has none."""
        report = self._params.report
        return b"" if report is None else report.made_of(self._rows, num_prompt_tokens)

    def add_tokens(self, packed: np.ndarray) -> None:
        """Of the tokens a round emitted, those included that the request does not keep."""
        if self._params.logprobs is not None and len(packed):
            self._tokens += PackedLogprobs.of_round(packed, self._params.logprobs)

    def take(self, num_tokens: int) -> tuple[tuple[TokenLogprob, ...], Sequence[TokenLogprob]]:
        """For an output of so many tokens: theirs, and the prompt's where it is the first one."""
        tokens, self._tokens = tuple(self._tokens[:num_tokens]), []
        prompt, self._prompt = self._prompt, []
        self.prompt_is_out = True
        return tokens, PackedLogprobs.joined(prompt) if prompt else ()
