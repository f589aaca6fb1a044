"""`wingbeat.LLM`: a verifier and its drafter in this process, with the settings of `wingbeat generate`."""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.deployments.api.bodies.requests import DEFAULT_MAX_TOKENS
from wingbeat.deployments.local.engine import LocalConfig, loading
from wingbeat.deployments.offline.choices import RunningChoice
from wingbeat.deployments.offline.prompts import (
    Conversation,
    Prompt,
    PromptLike,
    Reader,
    read_conversations,
    read_prompts,
)
from wingbeat.deployments.offline.results import Generated
from wingbeat.deployments.offline.sampling import SamplingParams
from wingbeat.deployments.options.problems import SettingsError, first_problem
from wingbeat.runtime import llm
from wingbeat.runtime.tokenizer import Tokenizer


class LLM:
    """Generates text from batches of prompts; only one thread at a time may call it.

    Args:
        model: as the setting `model`; with None, the demo pair's model is used.
        drafter: as the setting `drafter`.
        max_num_seqs: maximum number of sequences that run at once.
        settings: other settings of `wingbeat generate`, such as `max_model_len`, `dtype` and `kv_cache_memory_bytes`.

    Raises:
        ValueError, FileNotFoundError: the model, the drafter or a setting cannot be used; the message is one line that
            gives the reason.
    """

    def __init__(
        self, model: str | Path | None = None, drafter: str | Path = "auto", max_num_seqs: int = 16, **settings: Any
    ) -> None:
        try:
            config = LocalConfig(model=model, drafter=str(drafter), **settings)
        except ValidationError as error:
            raise SettingsError(first_problem(error, LocalConfig)) from None
        arguments = config.llm_arguments(max_num_seqs)
        with loading(config):
            self._llm = llm.LLM(channel_factory=InProcessChannel, **arguments)
        self._reader = Reader(self.tokenizer, self.max_model_len, self._llm.engine.loaded.vocab_size)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if the model's folder has no tokenizer."""
        return self._llm.tokenizer

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return self._llm.engine.config.max_model_len

    def generate(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        use_tqdm: bool | None = None,
        **fields: Any,
    ) -> list[Generated]:
        """Continue prompts; returns a list of results in the order of the prompts. For a single prompt the list has one
        result.

        Args:
            prompts: a text, a list of token ids, or several of these.
            sampling_params: parameters for all prompts, or a list with one entry per prompt.
            progress: show a progress bar while several prompts run, if standard error is a terminal.
            use_tqdm: vLLM's name for `progress`.
            fields: fields of `SamplingParams`, which may be given instead of `sampling_params`.

        Raises:
            ValueError: a prompt or a parameter cannot be used; no prompt was run. The message is one line that names
                the argument.
            RuntimeError: a prompt failed while it ran.
        """
        read = read_prompts(prompts, self._reader)
        params = _params_of(len(read), sampling_params, fields)
        return self._run(read, params, DEFAULT_MAX_TOKENS, progress if use_tqdm is None else use_tqdm)

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        use_tqdm: bool | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        **fields: Any,
    ) -> list[Generated]:
        """Answer conversations; returns a list of results in the order of the conversations. For a single conversation
        the list has one result.

        Args:
            messages: a conversation, which is a list of messages with `role` and `content`, or several conversations.
            sampling_params, progress, use_tqdm, fields: as for `generate`; without `max_tokens`, an answer may use all
                tokens up to `max_model_len`.
            tools, chat_template, chat_template_kwargs, add_generation_prompt, continue_final_message: as in
                `/v1/chat/completions`. Tool calls stay in the text.

        Raises:
            ValueError, RuntimeError: as `generate`; ValueError also if the model has no chat template.
        """
        options = {
            "tools": tools,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        given = {name: value for name, value in options.items() if value is not None}
        read = read_conversations(messages, self._reader, given)
        params = _params_of(len(read), sampling_params, fields)
        return self._run(read, params, None, progress if use_tqdm is None else use_tqdm)

    def _run(
        self, prompts: list[Prompt], params: list[SamplingParams], default_max_tokens: int | None, progress: bool
    ) -> list[Generated]:
        choices = [
            RunningChoice(prompt, asked, engine_params, self.tokenizer)
            for prompt, asked in zip(prompts, params, strict=True)
            for engine_params in asked.of_prompt(
                self._reader.vocab_size,
                self.tokenizer,
                self._max_tokens(prompt, asked, default_max_tokens),
                _draw_seed,
            )
        ]
        with _bar(len(choices), shown=progress) as bar:
            self._run_choices(choices, bar)
        ended = iter(choices)
        return [
            _result(prompt, [next(ended) for _ in range(asked.n or 1)])
            for prompt, asked in zip(prompts, params, strict=True)
        ]

    def _run_choices(self, choices: list[RunningChoice], bar: Progress) -> None:
        token_ids, params = [choice.prompt.token_ids for choice in choices], [choice.params for choice in choices]
        num_tokens = 0
        with closing(self._llm.stream(token_ids, params)) as outputs:
            for index, output in outputs:
                choice = choices[index]
                num_tokens += len(output.token_ids)
                choice.add_output(output)
                if choice.finish_reason is None:
                    continue
                # the choice was ended by a stop string; engines do not check stop strings
                if output.finish_reason is None:
                    choice.metrics = self._llm.stop(index)
                bar.update(bar.task_ids[0], advance=1, num_tokens=num_tokens)

    def _max_tokens(self, prompt: Prompt, params: SamplingParams, default: int | None) -> int:
        """Return the maximum number of tokens of an answer; raises ValueError if prompt and answer exceed
        `max_model_len`.
        """
        limit, room = self.max_model_len, self.max_model_len - len(prompt.token_ids)
        asked = params.max_tokens
        if room < 1 or (asked is not None and asked > room):
            beside = "" if asked is None else f" and max_tokens is {asked}"
            raise ValueError(
                f"{prompt.place} has {len(prompt.token_ids)} tokens{beside}: max_model_len is {limit}; shorten the "
                "prompt, lower max_tokens or raise max_model_len"
            )
        most = asked if asked is not None else room if default is None else min(default, room)
        if (params.min_tokens or 0) > most:
            raise ValueError(
                f"min_tokens is {params.min_tokens}: the answer to {prompt.place} may have at most {most} tokens"
            )
        return most


def _params_of(
    num_prompts: int, given: SamplingParams | Sequence[SamplingParams] | None, fields: dict[str, Any]
) -> list[SamplingParams]:
    """Return the parameters of each prompt; raises ValueError if both `sampling_params` and fields are given, or if the
    type or number of the parameters is wrong.
    """
    if given is None:
        return [SamplingParams(**fields)] * num_prompts
    if fields:
        raise ValueError(f"{next(iter(fields))} is given beside sampling_params: put it into sampling_params")
    listed = [given] * num_prompts if isinstance(given, SamplingParams) else given
    if isinstance(listed, dict | str) or not isinstance(listed, Sequence):
        kind = type(given).__name__
        raise ValueError(f"sampling_params is of the type {kind}: give wingbeat.SamplingParams, or a list of it")
    if len(listed) != num_prompts:
        raise ValueError(f"sampling_params has {len(listed)} entries: there are {num_prompts} prompts")
    for index, params in enumerate(listed):
        if not isinstance(params, SamplingParams):
            kind = type(params).__name__
            raise ValueError(f"sampling_params[{index}] is of the type {kind}: give wingbeat.SamplingParams")
    return list(listed)


def _result(prompt: Prompt, choices: list[RunningChoice]) -> Generated:
    first = choices[0]
    return Generated(
        prompt.text,
        prompt.token_ids,
        [choice.completion(index) for index, choice in enumerate(choices)],
        first.num_cached_tokens,
        None if first.params.prompt_logprobs is None else first.prompt_logprobs,
    )


def _draw_seed() -> int:
    return secrets.randbelow(2**53)


@contextmanager
def _bar(num_choices: int, *, shown: bool) -> Iterator[Progress]:
    """Context manager with a progress bar, shown only if several choices run and standard error is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[num_tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not (shown and num_choices > 1 and console.is_terminal)) as bar:
        bar.add_task("prompts", total=num_choices, num_tokens=0)
        yield bar
