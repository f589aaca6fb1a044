"""A load of requests that come and go, and drafters of every quality to serve it with."""

import random
from dataclasses import replace

from tests.runtime.models import TREE, eagle_drafter
from tests.runtime.scripted import ScriptedDrafter, random_tree, right_tree, wrong_tree
from tests.runtime.text_drafters import text_drafter
from wingbeat.runtime.drafters.choice import TEXT_DRAFTERS
from wingbeat.runtime.scheduling.request import Request, SamplingParams


def drafter_of(kind, ref):
    plans = {"right": right_tree, "wrong": wrong_tree, "random": random_tree}
    if kind in plans:
        return ScriptedDrafter(ref.sequences, plans[kind], ref.loaded.vocab_size)
    if kind in TEXT_DRAFTERS:
        return text_drafter(kind, TREE)
    return {"none": None, "eagle": eagle_drafter(ref.loaded, TREE)}[kind]


class Load:
    """Requests that arrive, end and are aborted at random rounds, with the expected tokens of the greedy requests."""

    def __init__(self, ref, end, seed, count=20):
        chance = random.Random(seed)
        self.arrivals: dict[int, list[Request]] = {}
        self.aborts: dict[int, list[str]] = {}
        self.expected: dict[str, list[int]] = {}
        """Expected tokens of greedy requests."""
        for number in range(count):
            name, index, at = str(number), chance.randrange(len(ref.prompts)), chance.randrange(20)
            limit = chance.randrange(1, 4) if chance.random() < 0.3 else chance.randrange(4, 64)
            params = {"max_tokens": limit, "ignore_eos": chance.random() < 0.5, "speculation": chance.random() < 0.85}
            params |= {"temperature": 0.0} if chance.random() < 0.8 else {"temperature": 0.9, "seed": number}
            request = Request(name, tuple(ref.prompts[index]), SamplingParams(**params))
            self.arrivals.setdefault(at, []).append(request)
            if chance.random() < 0.15:
                self.aborts.setdefault(at + chance.randrange(1, 12), []).append(name)
            if params["temperature"] == 0.0:
                tokens = ref.continuations[index][:limit]
                ends = end in tokens and not params["ignore_eos"]
                self.expected[name] = tokens[: tokens.index(end) + 1] if ends else tokens

    def play(self, engine, at_round=lambda number: None):
        """Serve all requests; return tokens by request, names of aborted requests, and finish reasons of the others."""
        tokens, reasons, aborted = {}, {}, set()
        number, last = 0, max([*self.arrivals, *self.aborts])
        while number <= last or engine.has_unfinished_requests():
            for request in self.arrivals.get(number, []):
                engine.add_request(request)
                tokens[request.request_id] = []
            for name in self.aborts.get(number, []):
                engine.abort_request(name)
                aborted |= {name} - set(reasons)
            at_round(number)
            for output in engine.step():
                assert output.request_id not in reasons, "an output after the last one"
                assert output.request_id not in aborted, "an output after an abort"
                tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    reasons[output.request_id] = output.finish_reason
            engine.check_integrity()
            number += 1
        assert reasons.keys() == tokens.keys() - aborted
        stats = engine.stats()
        assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks - 1)
        return tokens, aborted, reasons


def ending(ref):
    """The verifier with an end token that some texts meet early, some late and some never."""
    end = ref.continuations[0][9]
    return replace(ref.loaded, eos_token_ids=frozenset({end})), end
