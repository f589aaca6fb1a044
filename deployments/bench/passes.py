"""Prompts run together in one mode, and questions asked in both modes in turn."""

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
    """Answers to some prompts in one mode."""

    elapsed_s: float
    token_ids: list[list[int]]
    metrics: SpeculationMetrics


Passes = dict[bool, list[Pass]]
"""Passes over the same prompts, speculative (True) and plain."""


def params_of(config: BenchConfig, speculation: bool) -> SamplingParams:
    """Parameters of every request in one mode."""
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=config.seed,
        ignore_eos=config.dataset is None,
        speculation=speculation,
    )


def run_pass(llm: "LLM", params: SamplingParams, prompts: list[list[int]], batch_size: int) -> Pass:
    """Run prompts, `batch_size` at once."""
    token_ids, metrics = [], SpeculationMetrics()
    started = time.perf_counter()
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        for result in llm.generate(batch, [params] * len(batch)):
            token_ids.append(result.token_ids)
            metrics.add(result.metrics)
    return Pass(time.perf_counter() - started, token_ids, metrics)


def report_of(passes: Passes) -> Report:
    """Sums over passes."""
    metrics = SpeculationMetrics()
    for one in passes[True]:
        metrics.add(one.metrics)
    elapsed_s = {mode: sum(one.elapsed_s for one in done) for mode, done in passes.items()}
    answers = {mode: [ids for one in done for ids in one.token_ids] for mode, done in passes.items()}
    num_tokens = {mode: sum(map(len, given)) for mode, given in answers.items()}
    return Report(
        num_prompts=len(answers[False]),
        num_tokens=num_tokens[False],
        plain_tokens_per_s=num_tokens[False] / elapsed_s[False],
        speculative_tokens_per_s=num_tokens[True] / elapsed_s[True],
        same_tokens=answers[True] == answers[False],
        metrics=metrics,
    )


def run_questions(llm: "LLM", config: AskedOnce, questions: list[Question]) -> dict[str, Passes]:
    """Ask every question once per mode; returns the passes by category, without categories that have no answer.

    A batch holds questions of one category, whose time it takes. Speculation comes first: drafts that copy text would
    find the answer of plain decoding.

    Raises:
        UserError: no question fits the context.
    """
    modes = {speculation: params_of(config, speculation) for speculation in (True, False)}
    tokenizer, size = tokenizer_of(llm), config.batch_size
    for mode in modes.values():
        few = replace(mode, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        run_pass(llm, few, [tokenizer.encode(text) for text in PROMPTS], size)
    found: dict[str, Passes] = {}
    for category in dict.fromkeys(question.category for question in questions):
        group = [question for question in questions if question.category == category]
        passes: Passes = {True: [], False: []}
        for start in range(0, len(group), size):
            for speculation, mode in modes.items():
                passes[speculation] += _answers(llm, tokenizer, mode, group[start : start + size])
        if passes[False]:
            found[category] = passes
    if not found:
        limit = llm.engine.config.max_model_len
        raise UserError(f"--max-tokens {config.max_tokens}: no question fits beside them in the context of {limit}")
    return found


def tokenizer_of(llm: "LLM") -> "Tokenizer":
    """Tokenizer of the model; raises UserError where there is none."""
    if llm.tokenizer is None:
        raise UserError("the model has no tokenizer: bench needs text prompts")
    return llm.tokenizer


def _answers(llm: "LLM", tokenizer: "Tokenizer", params: SamplingParams, batch: list[Question]) -> list[Pass]:
    """Passes, one per turn; a conversation ends before the turn that exceeds the context."""
    passes, talks = [], [(list(question.turns), []) for question in batch]
    while talks:
        prompts, answered = [], []
        for turns, messages in talks:
            messages.append({"role": "user", "content": turns.pop(0)})
            prompt = _encode(tokenizer, messages)
            if len(prompt) + params.max_tokens <= llm.engine.config.max_model_len:
                prompts.append(prompt)
                answered.append((turns, messages))
        if prompts:
            passes.append(run_pass(llm, params, prompts, len(prompts)))
            for (_, messages), token_ids in zip(answered, passes[-1].token_ids, strict=True):
                messages.append({"role": "assistant", "content": tokenizer.decode(token_ids)})
        talks = [talk for talk in answered if talk[0]]
    return passes


def _encode(tokenizer: "Tokenizer", messages: list[dict[str, str]]) -> list[int]:
    if tokenizer.chat_template:
        return tokenizer.encode_chat(messages)
    return tokenizer.encode("\n".join(message["content"] for message in messages))
