"""Serves every causal LM of transformers as the verifier: text equal to transformers' own, or refused with a reason.

    .venv/bin/python benchmarks/architectures.py [--only llama,mistral] [--in-process]

Each model type is built small with random weights (`tiny_models.py`), prepared as a checkpoint would be, and generates
greedy text through the engine, to be compared with `generate()`: plainly, and with drafted trees of right and wrong
tokens; several prompts of different lengths at once, longer than every window. Outcomes: `equal`; `refused`, with the
reason; `WRONG`; `traceback`; `cannot be built`. Each model type runs in a process of its own, so that a crash or hang
affects that type alone. With `--only`, the results of other types are kept.
"""

import argparse
import copy
import json
import logging
import multiprocessing
import re
import sys
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch
from report import RESULTS, machine_facts
from tiny_models import VOCAB_SIZE, model_types, tiny_model
from told_drafter import ToldDrafter
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import prepare_model
from wingbeat.runtime.verifier_errors import UnsupportedModelError

PROMPT_LENS = (25, 5, 14)
NUM_TOKENS = 12
TIME_LIMIT_S = 180
NUM_PROCESSES = 2
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "models.md"
_BEGIN, _END = "<!-- begin: benchmarks/architectures.py -->", "<!-- end -->"


class Outcome(NamedTuple):
    """Result for one model type."""

    model_type: str
    architecture: str
    outcome: str
    """`equal`, `refused`, `WRONG`, `traceback` or `cannot be built`."""
    reason: str = ""


def try_architecture(model_type: str) -> Outcome:
    """Builds and prepares a model, and compares its texts with `generate()`, in this process."""
    try:
        model = tiny_model(model_type)
    except Exception as error:
        return Outcome(model_type, "", "cannot be built", _line(error))
    name = type(model).__name__
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENS]
    try:
        expected = [_generate(copy.deepcopy(model), prompt) for prompt in prompts]
    except Exception as error:
        return Outcome(model_type, name, "cannot be built", f"its own generate() fails: {_line(error)}")
    try:
        loaded = prepare_model(model, model_type)
    except UnsupportedModelError as error:
        return Outcome(model_type, name, "refused", str(error).partition(": ")[2])
    except Exception as error:
        return Outcome(model_type, name, "traceback", f"when loaded: {_line(error)}")
    try:
        for how, drafter in (("plainly", None), ("with trees", _told(prompts, expected))):
            for prompt, ours, theirs in zip(prompts, _write(loaded, prompts, drafter), expected, strict=True):
                if ours != theirs:
                    same = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
                    return Outcome(model_type, name, "WRONG", f"{how}: token {same} after {len(prompt)} differs")
    except Exception as error:
        return Outcome(model_type, name, "traceback", f"in use, {how}: {_line(error)}")
    return Outcome(model_type, name, "equal", f"{len({t for text in expected for t in text})} different tokens")


def _generate(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    model.set_attn_implementation("eager")
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "num_beams": 1}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, **settings)
    return out[0, len(prompt) :].tolist()


def _told(prompts: list[list[int]], texts: list[list[int]]) -> ToldDrafter:
    return ToldDrafter([prompt + text for prompt, text in zip(prompts, texts, strict=True)], VOCAB_SIZE)


def _write(loaded: LoadedModel, prompts: list[list[int]], drafter: ToldDrafter | None) -> list[list[int]]:
    config = EngineConfig(
        max_num_seqs=len(prompts),
        max_model_len=min(64, loaded.max_position_embeddings),
        max_num_batched_tokens=13,
        block_size=4,
        num_kv_blocks=120,
        speculation=SpeculationConfig(),
    )
    engine = build_engine(loaded, config, drafter, InProcessChannel)
    texts: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(str(index), tuple(prompt), params))
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts[int(output.request_id)] += output.token_ids
    engine.check_integrity()
    engine.model.remove_taps()
    if drafter is not None and engine.speculation.num_accepted_tokens == 0:
        raise RuntimeError("no drafted token was accepted")
    return texts


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _tell(model_type: str, connection: Connection) -> None:
    """Entry point of a child process: sends the outcome of one model type."""
    connection.send(try_architecture(model_type))


def in_children(kinds: list[str]) -> Iterator[Outcome]:
    """Yields outcomes as they arrive. Children are forked, so that imports are done once."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(reversed(kinds)), {}
    while waiting or running:
        while waiting and len(running) < NUM_PROCESSES:
            kind = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_tell, args=(kind, sender))
            process.start()
            sender.close()
            running[receiver] = (kind, process, time.monotonic() + TIME_LIMIT_S)
        ready = wait(list(running), timeout=1.0)
        late = [receiver for receiver, (_, _, end) in running.items() if time.monotonic() > end]
        for receiver in {*ready, *late}:
            kind, process, _ = running.pop(receiver)
            try:
                yield (
                    receiver.recv()
                    if receiver in ready
                    else Outcome(kind, "", "traceback", f"not done after {TIME_LIMIT_S} s")
                )
            except EOFError:
                process.join()
                yield Outcome(kind, "", "traceback", f"its process ended with {process.exitcode}")
            process.kill()


def _table(outcomes: list[Outcome]) -> str:
    """Model types by outcome and kind of reason; the results have each reason as it is."""
    groups: dict[str, list[str]] = {}
    for one in sorted(outcomes, key=lambda one: (one.outcome != "equal", one.outcome, one.model_type)):
        groups.setdefault(_kind_of(one), []).append(one.model_type)
    lines = ["| outcome | model types |", "|---|---|"]
    lines += [f"| {kind} ({len(types)}) | {', '.join(dict.fromkeys(types))} |" for kind, types in groups.items()]
    return "\n".join(lines)


def _kind_of(one: Outcome) -> str:
    """An outcome with its reason, less details such as the numbers of layers."""
    if one.outcome in ("equal", "cannot be built"):
        return "served" if one.outcome == "equal" else one.outcome
    reason = re.sub(r"\bits layers|\blayers \[[\d, ]*\]", "layers", one.reason.partition(":")[0])
    reason = re.sub(r"^layer \d+", "a layer", reason)
    reason = re.sub(r"(^its logits) .* (differ from .*) by .*", r"\1 \2", reason)
    return f"{one.outcome}: {reason}".replace("|", "\\|")


def _write_document(outcomes: list[Outcome]) -> None:
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    DOCUMENT.write_text(f"{before}{_BEGIN}\n\n{_table(outcomes)}\n\n{_END}{after}", encoding="utf-8")


def main() -> None:
    """Tests the selected model types, prints the outcomes and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="comma-separated model types; default: all")
    parser.add_argument("--in-process", action="store_true", help="run all types in this process, one by one")
    parser.add_argument("--output", default=str(RESULTS / "architectures.json"), help="JSON file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    kinds = options.only.split(",") if options.only else model_types()
    if options.in_process:
        outcomes = [try_architecture(kind) for kind in kinds]
    else:
        outcomes = []
        for outcome in in_children(kinds):
            print(*outcome, sep=" | ", flush=True)
            outcomes.append(outcome)
    output = Path(options.output)
    if options.only and output.is_file():
        known = json.loads(output.read_text(encoding="utf-8"))["outcomes"]
        outcomes += [Outcome(**one) for one in known if one["model_type"] not in kinds]
    outcomes.sort()
    report = {"facts": machine_facts(), "outcomes": [outcome._asdict() for outcome in outcomes]}
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if output == RESULTS / "architectures.json":
        _write_document(outcomes)
    if any(one.outcome in ("WRONG", "traceback") for one in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
