"""`wingbeat generate`: continues one prompt in this process."""

import json
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pydantic import Field, model_validator

from wingbeat.deployments.cli.options import UserError
from wingbeat.deployments.local.engine import LocalConfig, OpenEngine
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from wingbeat.runtime.llm import LLM


class GenerateConfig(LocalConfig):
    """Options of `wingbeat generate`, without the prompt."""

    prompt_ids: tuple[int, ...] = Field((), description="Token ids in place of a prompt text.")
    max_tokens: int = Field(128, ge=1, description="Tokens to generate at most.")
    temperature: float = Field(0.0, ge=0, le=100, description="0 takes the most likely token.")
    top_p: float = Field(1.0, gt=0, le=1, description="Smallest set of tokens with this much probability.")
    top_k: int = Field(0, ge=0, description="Most likely tokens to choose from; 0 for all.")
    min_p: float = Field(0.0, ge=0, le=1, description="Least probability, as a share of the most likely token's.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="Of the sampling noise; drawn if not given.")
    ignore_eos: bool = Field(False, description="Go on after the end-of-text token.")
    speculation: bool = Field(True, description="Verify drafts; without, the same tokens come one by one.")

    @model_validator(mode="after")
    def _check_prompt_ids(self) -> Self:
        if any(token_id < 0 for token_id in self.prompt_ids):
            raise ValueError("--prompt-ids holds a negative number; token ids begin at 0")
        return self

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of the request; the seed is random if no seed was given."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=secrets.randbelow(2**53) if self.seed is None else self.seed,
            ignore_eos=self.ignore_eos,
            speculation=self.speculation,
        )


class Generated(NamedTuple):
    """The answer to one prompt."""

    text: str
    """Text of the answer; empty if the model has no tokenizer."""
    token_ids: list[int]
    """Generated token ids. If a stop string ended the answer, the last id is the token that completed the stop
    string.
    """
    finish_reason: FinishReason
    metrics: SpeculationMetrics | None
    """Speculation figures; None if a stop string ended the answer before the engine had reported any."""


def generate_command(
    config: GenerateConfig, prompt: str | None, stops: tuple[str, ...], as_json: bool, open_engine: OpenEngine
) -> None:
    """Print the answer piece by piece as it grows, or as one JSON object.

    Raises:
        UserError: there is no prompt or more than one prompt, or the engine cannot run the prompt.
    """
    if (prompt is None) == (not config.prompt_ids):
        raise UserError("give a PROMPT or --prompt-ids, one of the two")
    if not all(stops):
        raise UserError("--stop is empty: leave it out or give some text")
    llm = open_engine(config, 1)
    prompt_ids = _prompt_token_ids(llm, config, prompt)
    params = config.sampling_params()
    started = time.perf_counter()
    got = run_prompt(llm, prompt_ids, params, stops, on_text=None if as_json else partial(print, end="", flush=True))
    elapsed_s = time.perf_counter() - started
    if as_json:
        print(json.dumps(as_response(got, params.seed)))
        return
    print()
    acceptance = f", acceptance length {got.metrics.acceptance_length:.2f}" if got.metrics else ""
    speed = f"{len(got.token_ids)} tokens, {len(got.token_ids) / elapsed_s:.1f} tokens/s"
    print(f"[{got.finish_reason}: {speed}{acceptance}, seed {params.seed}]", file=sys.stderr)


def run_prompt(
    llm: "LLM",
    prompt_ids: list[int],
    params: SamplingParams,
    stops: tuple[str, ...],
    on_text: Callable[[str], None] | None,
) -> Generated:
    """Generate from one prompt; `on_text` is called with each piece of text as soon as the piece can no longer change.

    Raises:
        UserError: the engine refuses the prompt, or stop strings are given for a model without tokenizer.
    """
    stream = _text_stream(llm, prompt_ids, stops)
    token_ids: list[int] = []
    pieces: list[str] = []
    metrics, finish = None, FinishReason.ABORT
    try:
        with closing(llm.stream([prompt_ids], [params])) as outputs:
            for _, output in outputs:
                metrics, finish = output.metrics or metrics, output.finish_reason
                if stream is None:
                    token_ids += output.token_ids
                    continue
                got, finish = stream.take(output.token_ids, output.finish_reason)
                token_ids += output.token_ids[: got.num_tokens]
                pieces.append(got.text)
                if on_text is not None and got.text:
                    on_text(got.text)
                if finish is not None:
                    break
    except ValueError as error:
        raise UserError(str(error)) from error
    return Generated("".join(pieces), token_ids, finish, metrics)


def as_response(got: Generated, seed: int) -> dict[str, Any]:
    """Return the fields of the HTTP response, plus the token ids."""
    metrics = None if got.metrics is None else got.metrics.as_dict()
    return {
        "text": got.text,
        "token_ids": got.token_ids,
        "finish_reason": got.finish_reason,
        "seed": seed,
        "metrics": {"speculative_decoding": metrics},
    }


def _prompt_token_ids(llm: "LLM", config: GenerateConfig, prompt: str | None) -> list[int]:
    if prompt is not None and llm.tokenizer is None:
        raise UserError("the model has no tokenizer: give --prompt-ids in place of a text")
    prompt_ids = list(config.prompt_ids) if prompt is None else llm.tokenizer.encode(prompt)
    limit = llm.engine.config.max_model_len
    if not prompt_ids:
        raise UserError("the prompt is empty: at least one token is needed")
    if len(prompt_ids) + config.max_tokens > limit:
        raise UserError(
            f"{len(prompt_ids)} prompt tokens and --max-tokens {config.max_tokens} exceed the context of {limit}: "
            "shorten one of them, or raise --max-model-len as far as the model allows"
        )
    return prompt_ids


def _text_stream(llm: "LLM", prompt_ids: list[int], stops: tuple[str, ...]):
    from wingbeat.runtime.text_stream import TextStream

    if llm.tokenizer is None:
        if stops:
            raise UserError("the model has no tokenizer: --stop cannot be found in its answer")
        return None
    return TextStream(llm.tokenizer, prompt_ids, stops)
