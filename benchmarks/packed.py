"""Decoding with weights in several formats, compared with llama.cpp and OpenVINO GenAI: tokens per second.

    .venv/bin/python benchmarks/packed.py MODEL[:DTYPE[:ACTIVATIONS[:DRAFTER]]] [..] [--llama-cpp PYTHON]
        [--openvino PYTHON [--openvino-model DIR]] [--rewrite FORM]

A MODEL is a folder, a GGUF file or a name; DTYPE is a value of `--dtype`, float32 by default, ACTIVATIONS one of
`--cpu-activations`, and DRAFTER one of `--drafter`, plain decoding by default. llama.cpp decodes plainly and, if some
DRAFTER is given, with each of its own drafters that need no model (`LLAMA_DRAFTS`). Both peers read the first MODEL
that is a GGUF file, by a PYTHON that has `xllamacpp` or `openvino-genai`; OpenVINO reads DIR instead if given, as
exported by `optimum-cli export openvino`. With FORM, a GGUF format such as Q8_0 or F32, that file's matrices are
converted first. Each engine runs in a process of its own, and their blocks alternate, so that a drift of the machine
affects all alike, each with new prompts; figures are medians over the repeats, with minimum and maximum. Perplexity is
measured on Spec-Bench's questions.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from report import Report, Table, machine_facts, middle, spread
from workload import describe, held_out_prompts

from wingbeat.cluster.cores import waiting_env
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.standard_library import stdlib_root
from wingbeat.runtime.tokenizer import Tokenizer

CHILD = Path(__file__).with_name("packed_child.py")
LLAMA_DRAFTS = ("ngram_simple", "ngram_mod", "ngram_map_k")
QUESTIONS = Path(__file__).parents[1] / "deployments" / "bench" / "data" / "spec_bench_held_out.jsonl"


@dataclass
class Held:
    """A model in one format, loaded in a process."""

    name: str
    process: subprocess.Popen[str]
    log: IO[str]
    """Standard error of the process."""
    facts: dict[str, float]
    rates: dict[int, list[float]] = field(default_factory=dict)
    """Tokens per second of each block, by number of concurrent requests."""

    def run(self, prompts: list[list[int]], tokens: int) -> float:
        """Runs prompts; returns tokens per second of all of them together."""
        with suppress(BrokenPipeError):  # then no answer comes either
            self.process.stdin.write(json.dumps([prompts, tokens]) + "\n")
            self.process.stdin.flush()
        return len(prompts) * tokens / answer_of(self.process, self.log, float)


def answer_of(process: subprocess.Popen[str], log: IO[str], read: Any) -> Any:
    """Reads the next line that is an answer; libraries print lines of their own.

    Raises:
        RuntimeError: the process has ended; with its last message.
    """
    for line in process.stdout:
        try:
            return read(line)
        except ValueError:
            continue
    log.seek(0)
    last = (log.read().strip().splitlines() or ["no message"])[-1]
    raise RuntimeError(f"{' '.join(map(str, process.args))} has ended: {last}")


def opened(stack: ExitStack, name: str, python: Path | str, *words: Any) -> Held:
    """Starts a process that ends with the stack, and waits until its model is loaded."""
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it ends with the stack)
    stack.callback(log.close)
    process = stack.enter_context(
        subprocess.Popen(
            [python, CHILD, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | (waiting_env() if words[0] == "wingbeat" else {}),
        )
    )
    stack.callback(process.kill)
    return Held(name, process, log, answer_of(process, log, dict_of))


def rewritten(file: Path, form: str, folder: Path) -> Path:
    """Writes a copy of a GGUF file with all matrices converted to one format."""
    reader, kind = GGUFReader(file), GGMLQuantizationType[form]
    found = folder / f"{file.stem}-{form}.gguf"
    writer = GGUFWriter(found, reader.get_field("general.architecture").contents())
    for name, entry in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            inner = entry.types[-1] if entry.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), entry.types[0], sub_type=inner)
    for tensor in reader.tensors:
        is_matrix = len(tensor.shape) > 1
        data = quantize(dequantize(tensor.data, tensor.tensor_type), kind) if is_matrix else tensor.data
        writer.add_tensor(tensor.name, data, raw_dtype=kind if is_matrix else tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def dict_of(line: str) -> dict[str, float]:
    """Parses a JSON object; raises ValueError for any other line."""
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError(line)
    return found


def opened_all(stack: ExitStack, args: argparse.Namespace, text: str) -> list[Held]:
    """Opens every engine that the arguments select."""
    most, found, speculates = max(args.at_once), [], False
    for given in args.models:
        model, dtype, activations, drafter = (*given.split(":"), "", "", "")[:4]
        form = (dtype, activations and f"{activations} activations", drafter and f"drafts by {Path(drafter).name}")
        name = ", ".join((Path(model).name, *(word for word in form if word)))
        words = model, args.threads, most, dtype or "float32", activations or "exact", drafter or "none", text
        found.append(opened(stack, name, sys.executable, "wingbeat", *words))
        speculates |= bool(drafter)
    if args.llama_cpp is not None:
        for drafts in ("none", *(LLAMA_DRAFTS if speculates else ())):
            name = "llama.cpp" if drafts == "none" else f"llama.cpp, {drafts}"
            found.append(opened(stack, name, args.llama_cpp, "llama.cpp", args.file, args.threads, most, drafts))
    if args.openvino is not None:
        own = args.openvino_model or args.file
        found.append(opened(stack, "OpenVINO GenAI", args.openvino, "openvino", own, args.threads, most))
    return found


def main() -> None:
    """Parses the arguments, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL[:DTYPE[:ACTIVATIONS[:DRAFTER]]]")
    parser.add_argument("--llama-cpp", type=Path, metavar="PYTHON")
    parser.add_argument("--openvino", type=Path, metavar="PYTHON")
    parser.add_argument("--openvino-model", type=Path, metavar="DIR")
    parser.add_argument("--rewrite", metavar="FORM", help="convert the first GGUF file's matrices to this format first")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="write no file")
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")
    args = parser.parse_args()
    read = next((given.partition(":")[0] for given in args.models if ".gguf" in given), None)
    if read is None and (args.llama_cpp or args.openvino or args.rewrite):
        parser.error("the peers and --rewrite need a MODEL that is a GGUF file")
    with tempfile.TemporaryDirectory() as folder:
        args.file = read
        if args.rewrite is not None:
            args.file = str(rewritten(Path(read), args.rewrite, Path(folder)))
            args.models = [given.replace(read, args.file) for given in args.models]
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """Measures the models."""
    tokenizer = Tokenizer.load(checkpoint_folder(args.models[0].partition(":")[0]))
    prompts = held_out_prompts(tokenizer, stdlib_root(), (1 + args.repeats) * sum(args.at_once))
    with ExitStack() as stack:
        text = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8"))
        entries = map(json.loads, QUESTIONS.read_text(encoding="utf-8").splitlines())
        text.write("\n\n".join(entry["prompt"] for entry in entries))
        text.flush()
        engines = opened_all(stack, args, text.name)
        waiting = iter(prompts)
        for repeat in range(1 + args.repeats):
            for at_once in args.at_once:
                asked = [next(waiting).token_ids for _ in range(at_once)]
                for engine in engines:
                    rate = engine.run(asked, args.tokens)
                    if repeat:  # the first block is a warm-up
                        engine.rates.setdefault(at_once, []).append(rate)
    facts = machine_facts() | {"prompts": describe(prompts), "answers": f"{args.tokens} tokens"}
    words = (Path(word).name for word in sys.argv)
    facts |= {"threads": str(args.threads), "command": shlex.join(words)}
    figures = {one.name: one.facts | {str(count): rates for count, rates in one.rates.items()} for one in engines}
    Report("packed", facts, [table(engines, args.at_once)], figures).finish(args, "packed")


FACTS = {"megabytes": ".0f", "perplexity": ".3f"}
"""Facts that a child reports about its model, with their formats."""


def table(engines: list[Held], sizes: list[int]) -> Table:
    """Table with one row per engine; each rate is also given relative to the best peer's."""
    peers = [one for one in engines if not one.facts]
    rows = []
    for engine in engines:
        cells = [f"{engine.facts[name]:{form}}" if name in engine.facts else "" for name, form in FACTS.items()]
        for size in sizes:
            best = max((middle(peer.rates[size]) for peer in peers), default=0)
            more = f", {middle(engine.rates[size]) / best:.2f} x" if best and engine not in peers else ""
            cells.append(spread(engine.rates[size]) + more)
        rows.append((engine.name, *cells))
    columns = ("engine", "MB", "perplexity", *(f"{count} at once" for count in sizes))
    return Table("Tokens per second; times the best peer's", columns, rows)


if __name__ == "__main__":
    main()
