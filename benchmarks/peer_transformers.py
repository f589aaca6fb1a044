"""transformers' `generate()` and `transformers serve` compared with Wingbeat: same model, same prompts, greedy.

    .venv/bin/python benchmarks/peer_transformers.py [--skip-http]

In process: `generate()` on left-padded batches against Wingbeat, plain and speculative, without any server. Over HTTP:
`transformers serve`, one request at a time and with its continuous batching, against Wingbeat on Ray Serve. Contestants
take turns; figures are medians over the repeats. The tables state thread counts: a peer with a single process is also
measured with as many threads as Wingbeat's two processes have together.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import torch
from contest import Contestant, Outcome, compete, figures, http_contestant, versus_table
from http_load import LoadClient
from local_engine import MAX_MODEL_LEN, Pair, add_model_options, chosen_pair, generate, greedy, open_llm, quiet
from report import Report, machine_facts, model_facts
from servers import transformers_serve, wingbeat_apps
from serving import request_body
from transformers import AutoModelForCausalLM, PreTrainedModel
from workload import Prompt, describe, held_out_prompts

from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.tokenizer import Tokenizer

PEER_THREADS = (1, 2)
NO_TOKEN = -1


def transformers_contestant(model: PreTrainedModel, threads: int) -> Contestant:
    """Contestant that calls `generate()` as usual for several prompts: left padding and an attention mask."""

    def run(prompts: list[Prompt], size: int, max_tokens: int) -> Outcome:
        torch.set_num_threads(threads)
        answers: list[list[int]] = []
        started = time.perf_counter()
        for start in range(0, len(prompts), size):
            token_ids, mask = left_padded([prompt.token_ids for prompt in prompts[start : start + size]])
            out = model.generate(token_ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
            answers += out[:, token_ids.shape[1] :].tolist()
        return Outcome(len(prompts) * max_tokens / (time.perf_counter() - started), answers)

    return Contestant("transformers generate()", str(threads), run)


def wingbeat_contestants(pair: Pair, max_num_seqs: int) -> list[Contestant]:
    """Contestants with one thread each: plain decoding by an engine without a drafter, and speculative decoding."""

    def contestant(name: str, drafter: Any) -> Contestant:
        llm = open_llm(Pair(pair.model, drafter), max_num_seqs=max_num_seqs)

        def run(prompts: list[Prompt], size: int, max_tokens: int) -> Outcome:
            torch.set_num_threads(1)
            done = generate(llm, [prompt.token_ids for prompt in prompts], greedy(max_tokens), size)
            return Outcome(done.tokens_per_s, done.token_ids)

        return Contestant(name, "1", run)

    return [contestant("Wingbeat, plain", "none"), contestant("Wingbeat, speculative", pair.drafter)]


def left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-pads prompts; returns token ids and attention mask, int64 [num_prompts, longest]."""
    longest = max(map(len, prompts))
    token_ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(token_ids)
    for row, prompt in enumerate(prompts):
        token_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return token_ids, mask


def load_peer(pair: Pair) -> PreTrainedModel:
    """Loads the verifier in transformers, in float32.

    Generation continues past the end of text, as in the other contestants.
    """
    model = AutoModelForCausalLM.from_pretrained(
        pair.model, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def peer_body(pair: Pair, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
    """Request body for the peer: its schema has no ignore_eos, so the generation config disables the end token."""
    config = {"max_new_tokens": max_tokens, "do_sample": False, "eos_token_id": NO_TOKEN, "pad_token_id": 0}
    return {"model": str(pair.model), "prompt": prompt.text, "generation_config": json.dumps(config)}


@contextlib.contextmanager
def http_contestants(pair: Pair) -> Iterator[list[Contestant]]:
    """Starts every server; the peer comes first, because the table is relative to the first contestant."""
    settings = {"model": pair.model, "max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": False}
    configs = {
        "plain": AppConfig(drafter="none", **settings),
        "speculative": AppConfig(drafter=str(pair.drafter), **settings),
    }
    with contextlib.ExitStack() as stack:
        apps = stack.enter_context(wingbeat_apps(configs))
        peers = [
            ("transformers serve", threads, stack.enter_context(transformers_serve(pair.model, threads)))
            for threads in PEER_THREADS
        ]
        url = stack.enter_context(transformers_serve(pair.model, 1, "--continuous-batching"))
        peers.append(("transformers serve --continuous-batching", 1, url))
        client = stack.enter_context(LoadClient())
        contestants = []
        for name, threads, url in peers:
            contestants.append(
                http_contestant(client, name, str(threads), url, lambda prompt, n: peer_body(pair, prompt, n))
            )
        name = configs["plain"].model_name()
        for kind, threads in (("plain", "1"), ("speculative", "1 + 1")):
            contestants.append(
                http_contestant(
                    client,
                    f"Wingbeat, {kind}",
                    threads,
                    apps[kind].url,
                    lambda prompt, n: request_body(name, prompt, n),
                )
            )
        yield contestants


def run(args: argparse.Namespace) -> Report:
    """Runs both contests."""
    pair = chosen_pair(args)
    prompts = held_out_prompts(Tokenizer.load(pair.model), args.corpus, max(args.prompts, *args.sizes))
    facts = {**machine_facts(), **model_facts(*pair)}
    facts["workload"] = f"{describe(prompts)}; greedy, {args.max_tokens} tokens each, float32"
    facts["Wingbeat"] = "no prefix cache"
    peer = load_peer(pair)
    local = [transformers_contestant(peer, threads) for threads in PEER_THREADS]
    local += wingbeat_contestants(pair, max(args.sizes))
    compete(local, args, prompts)
    tables = [versus_table(local, args.sizes, "In process", args.repeats)]
    results = {"in_process": figures(local)}
    if not args.skip_http:
        with http_contestants(pair) as remote:
            compete(remote, args, prompts)
        tables.append(versus_table(remote, args.sizes, "Over HTTP", args.repeats))
        results["http"] = figures(remote)
    return Report("Beside transformers", facts, tables, results)


def main() -> None:
    """Measures, prints and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--skip-http", action="store_true", help="skip the servers")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1, 4, 16], help="batch sizes, and numbers of concurrent clients"
    )
    parser.add_argument("--prompts", type=int, default=8, help="prompts per turn; at least the batch size is used")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.prompts, args.max_tokens, args.repeats = [1, 2], 2, 16, 1
    quiet()
    report = run(args)
    report.finish(args, "peer_transformers")


if __name__ == "__main__":
    main()
