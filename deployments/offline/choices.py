"""Follows a choice of `wingbeat.LLM` while it runs: converts tokens to text and detects stop strings."""

from wingbeat.deployments.offline.prompts import Prompt
from wingbeat.deployments.offline.results import Completion
from wingbeat.deployments.offline.sampling import SamplingParams
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling import request
from wingbeat.runtime.scheduling.request import FinishReason, RequestOutput, TokenLogprob
from wingbeat.runtime.text_stream import StreamedText, TextStream
from wingbeat.runtime.tokenizer import Tokenizer


class RunningChoice:
    """A choice of a prompt while its tokens arrive.

    Args:
        asked: the caller's parameters.
        params: the engine's parameters.
        tokenizer: None for a model without tokenizer, whose choices have no text.
    """

    def __init__(
        self, prompt: Prompt, asked: SamplingParams, params: request.SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.prompt, self.params = prompt, params
        self.metrics = SpeculationMetrics()
        self.finish_reason: FinishReason | None = None
        """Why the choice has ended; None while the choice runs."""
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob] = []
        self._asked, self._tokenizer = asked, tokenizer
        # created with the first token, because most prompts of a long list are still waiting and need no stream yet
        self._stream: TextStream | None = None
        self._stop_reason: str | int | None = None
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def add_output(self, output: RequestOutput) -> None:
        """Add the tokens of a round; if they are the last tokens, also set `finish_reason`."""
        got, self.finish_reason = self._read(output)
        self._pieces.append(got.text)
        self._token_ids += output.token_ids[: got.num_tokens]
        self._logprobs += output.logprobs[: got.num_tokens]
        self.prompt_logprobs += output.prompt_logprobs
        if output.finish_reason is not None:
            self.metrics, self.num_cached_tokens = output.metrics, output.num_cached_tokens
        if self.finish_reason is FinishReason.STOP:
            self._stop_reason = self._why_stopped()
        if self.finish_reason is not None:
            self._stream = None

    def completion(self, index: int) -> Completion:
        """Return the finished choice."""
        return Completion(
            index,
            "".join(self._pieces),
            self._token_ids,
            str(self.finish_reason),
            self._stop_reason,
            self.metrics,
            None if self.params.logprobs is None else self._logprobs,
        )

    def _read(self, output: RequestOutput) -> tuple[StreamedText, FinishReason | None]:
        if self._tokenizer is None:
            return StreamedText("", len(output.token_ids), stopped=False), output.finish_reason
        if self._stream is None:
            self._stream = TextStream(
                self._tokenizer,
                self.prompt.token_ids,
                self._asked.stops,
                skip_special_tokens=self._asked.skip_special_tokens is not False,
                include_stop=bool(self._asked.include_stop_str_in_output),
                min_tokens=self.params.min_tokens,
            )
        return self._stream.take(output.token_ids, output.finish_reason)

    def _why_stopped(self) -> str | int | None:
        """Return the stop string, or the token of `stop_token_ids`, that ended the choice; None if the choice ended
        otherwise.
        """
        if self._stream is not None and self._stream.stopped_by is not None:
            return self._stream.stopped_by
        last = self._token_ids[-1] if self._token_ids else None
        return last if last in self.params.stop_token_ids else None
