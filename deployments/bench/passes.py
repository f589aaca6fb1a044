"""Runs batches of prompts in one mode, and questions in both modes (speculative and plain) in turn."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.deployments.bench.options import PROMPTS, AskedOnce, BenchConfig
from wingbeat.deployments.bench.questions import Question
from wingbeat.deployments.bench.report import Report
from wingbeat.deployments.cli.options import UserError
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.request import SamplingParams

if TYPE_CHECKING:
    from wingbeat.runtime.llm import LLM
    from wingbeat.runtime.tokenizer import Tokenizer

WARM_UP_TOKENS = 16


class Pass(NamedTuple):
    """Result of running some prompts in one mode."""

    elapsed_s: float
    decode_s: float
    """Seconds from the moment at which every prompt of a batch has its first token to the end of the batch, summed over
    batches.
    """
    num_rounds: int
    """Number of rounds within `decode_s`; a round counts once for each request that got tokens in it."""
    num_decoded: int
    """Number of tokens generated within `decode_s`."""
    token_ids: list[list[int]]
    metrics: SpeculationMetrics


Passes = dict[bool, list[Pass]]
"""Passes over the same prompts: speculative (True) and plain (False)."""


def params_of(config: BenchConfig, speculation: bool) -> SamplingParams:
    """Return the sampling parameters of all requests in one mode."""
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=config.seed,
        ignore_eos=config.dataset is None,
        speculation=speculation,
    )


def run_pass(llm: "LLM", params: SamplingParams, prompts: list[list[int]], batch_size: int) -> Pass:
    """Run prompts in batches of `batch_size`."""
    token_ids: list[list[int]] = [[] for _ in prompts]
    metrics, num_rounds, num_decoded, decode_s = SpeculationMetrics(), 0, 0, 0.0
    started = began = time.perf_counter()
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        waiting = {*range(len(batch))}
        for index, output in llm.stream(batch, [params] * len(batch)):
            token_ids[start + index] += output.token_ids
            metrics.add(output.metrics or SpeculationMetrics())
            if waiting:
                waiting.discard(index)
                began = time.perf_counter()
            elif output.token_ids:
                num_rounds, num_decoded = num_rounds + 1, num_decoded + len(output.token_ids)
        decode_s += time.perf_counter() - began
    return Pass(time.perf_counter() - started, decode_s, num_rounds, num_decoded, token_ids, metrics)


def report_of(passes: Passes) -> Report:
    """Return a report whose figures are summed over passes."""
    plain, speculative = _summed(passes[False]), _summed(passes[True])
    num_tokens, num_rounds = sum(map(len, plain.token_ids)), max(1, speculative.num_rounds)
    plain_round_s = plain.decode_s / max(1, plain.num_rounds)
    return Report(
        num_prompts=len(plain.token_ids),
        num_tokens=num_tokens,
        plain_tokens_per_s=num_tokens / plain.elapsed_s,
        speculative_tokens_per_s=sum(map(len, speculative.token_ids)) / speculative.elapsed_s,
        same_tokens=speculative.token_ids == plain.token_ids,
        metrics=speculative.metrics,
        tokens_a_round=speculative.num_decoded / num_rounds,
        break_even=speculative.decode_s / num_rounds / plain_round_s if speculative.metrics.num_drafts else None,
    )


def _summed(passes: list[Pass]) -> Pass:
    metrics = SpeculationMetrics()
    for one in passes:
        metrics.add(one.metrics)
    elapsed_s, decode_s, num_rounds, num_decoded = (sum(column) for column in list(zip(*passes, strict=True))[:4])
    token_ids = [ids for one in passes for ids in one.token_ids]
    return Pass(elapsed_s, decode_s, num_rounds, num_decoded, token_ids, metrics)


def run_questions(llm: "LLM", config: AskedOnce, questions: list[Question]) -> tuple[Passes, dict[str, Passes]]:
    """Ask every question once per mode; returns all passes, and the passes of each category.

    For each category the speculative mode runs first, then the plain mode; in the reverse order, drafters that copy
    text could copy the answers of plain decoding.

    Raises:
        UserError: no question fits the context.
    """
    modes = {speculation: params_of(config, speculation) for speculation in (True, False)}
    tokenizer, size = tokenizer_of(llm), config.batch_size[0]
    for params in modes.values():
        few = replace(params, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        run_pass(llm, few, [tokenizer.encode(text) for text in PROMPTS], size)
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    found = {
        category: {mode: _answers(llm, tokenizer, params, size, group) for mode, params in modes.items()}
        for category, group in groups.items()
    }
    every = {mode: [one for passes in found.values() for one in passes[mode]] for mode in modes}
    if not every[False]:
        limit = llm.engine.config.max_model_len
        raise UserError(f"--max-tokens {config.max_tokens}: no question fits beside them in the context of {limit}")
    return every, {category: passes for category, passes in found.items() if passes[False]}


def tokenizer_of(llm: "LLM") -> "Tokenizer":
    """Return the tokenizer of the model; raises UserError if there is none."""
    if llm.tokenizer is None:
        raise UserError("the model has no tokenizer: bench needs text prompts")
    return llm.tokenizer


def _answers(
    llm: "LLM", tokenizer: "Tokenizer", params: SamplingParams, batch_size: int, questions: list[Question]
) -> list[Pass]:
    """Run the turns of conversations; returns one pass per turn. A conversation ends before the turn that exceeds the
    context.
    """
    passes, talks = [], [(list(question.turns), []) for question in questions]
    while talks:
        prompts, answered = [], []
        for turns, messages in talks:
            messages.append({"role": "user", "content": turns.pop(0)})
            prompt = _encode(tokenizer, messages, is_chat=not params.ignore_eos)
            if len(prompt) + params.max_tokens <= llm.engine.config.max_model_len:
                prompts.append(prompt)
                answered.append((turns, messages))
        if prompts:
            passes.append(run_pass(llm, params, prompts, batch_size))
            for (_, messages), token_ids in zip(answered, passes[-1].token_ids, strict=True):
                messages.append({"role": "assistant", "content": tokenizer.decode(token_ids)})
        talks = [talk for talk in answered if talk[0]]
    return passes


def _encode(tokenizer: "Tokenizer", messages: list[dict[str, str]], is_chat: bool) -> list[int]:
    if is_chat and tokenizer.chat_template:
        return tokenizer.encode_chat(messages)
    return tokenizer.encode("\n".join(message["content"] for message in messages))
