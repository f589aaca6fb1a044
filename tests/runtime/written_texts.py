"""Texts with what their tokens were chosen by, for comparisons up to near-ties."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from tests.near_ties import Written
from wingbeat.kernels.sampling.noise import gumbel_noise
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.scheduling.request import MAX_LOGPROBS, Request, SamplingParams, TokenLogprob


def write(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Written]:
    """Texts that an engine generates after each prompt, with the likeliest tokens of each position."""
    token_ids: list[list[int]] = [[] for _ in prompts]
    reported: list[list[TokenLogprob]] = [[] for _ in prompts]
    for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(Request(str(index), tuple(prompt), replace(param, logprobs=MAX_LOGPROBS)))
    while engine.has_unfinished_requests():
        for output in engine.step():
            token_ids[int(output.request_id)] += output.token_ids
            reported[int(output.request_id)] += output.logprobs

    def written(index: int) -> Written:
        def scores_at(place: int) -> Mapping[int, float]:
            own = reported[index][place]
            logits = dict(own.top) | {token_ids[index][place]: own.logprob}
            return scores_of(logits, params[index], len(prompts[index]) + place)

        return Written(token_ids[index], scores_at)

    return [written(index) for index in range(len(prompts))]


def scores_of(logits: Mapping[int, float], params: SamplingParams, position: int) -> dict[int, float]:
    """By what one of these tokens is chosen, where nothing but the temperature and the noise alters their logits."""
    token_ids, scores = torch.tensor(list(logits)), torch.tensor(list(logits.values()))
    if params.temperature > 0:
        noise = gumbel_noise(torch.tensor([params.seed]), torch.tensor([position]), token_ids)
        scores = scores / params.temperature + noise[0]
    return dict(zip(token_ids.tolist(), scores.tolist(), strict=True))
