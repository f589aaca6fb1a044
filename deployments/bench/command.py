"""`wingbeat bench`: runs the same prompts with and without speculation, interleaved, in this process."""

import json
import os
import statistics
from typing import TYPE_CHECKING, Any

from wingbeat.deployments.bench.comparison import compare
from wingbeat.deployments.bench.golden import golden_length
from wingbeat.deployments.bench.options import BenchConfig
from wingbeat.deployments.bench.passes import Passes, params_of, report_of, run_pass, run_questions, tokenizer_of
from wingbeat.deployments.bench.questions import read_questions
from wingbeat.deployments.bench.report import Report, category_table, tables
from wingbeat.deployments.cli.options import UserError
from wingbeat.deployments.local.engine import OpenEngine

if TYPE_CHECKING:
    from rich.table import Table

    from wingbeat.runtime.llm import LLM


def bench_command(config: BenchConfig, as_json: bool, open_engine: OpenEngine) -> None:
    """Run the comparison and print it; raises UserError if the engine or the prompts cannot be used."""
    os.environ |= config.environment()  # engines in this process and in child processes read these variables
    if config.compares():
        found, shown = compare(config)
    elif config.dataset is not None:
        found, shown = _bench_dataset(config, config.dataset, open_engine)
    else:
        llm = open_engine(config, config.batch_size[0])
        report = run_bench(llm, config, _encode(llm, config))
        found, shown = report.as_dict(), tables(report, config)
    if config.golden is not None:
        length = golden_length(config.golden, config.draft_steps)
        found |= {"golden": length._asdict()}
        shown[0].caption = f"length of {length.head}: {length.workload}; {length.source}"
    if as_json:
        print(json.dumps(found))
    else:
        from rich.console import Console

        console = Console()
        for table in shown:
            console.print(table)


def run_bench(llm: "LLM", config: BenchConfig, prompts: list[list[int]]) -> Report:
    """Run the speculative and the plain mode in turn, so that a gradual change of the machine's speed affects both
    modes equally.
    """
    modes = {speculation: params_of(config, speculation) for speculation in (False, True)}
    for params in modes.values():
        # The first pass is not counted, because it fills caches, including the prefix cache, and does set-up that is
        # done at first use.
        run_pass(llm, params, prompts, config.batch_size[0])
    passes: Passes = {False: [], True: []}
    for _ in range(config.repeat):
        for speculation, done in passes.items():
            done.append(run_pass(llm, modes[speculation], prompts, config.batch_size[0]))
    medians = {mode: statistics.median(one.elapsed_s for one in done) for mode, done in passes.items()}
    report = report_of({mode: [done[-1]._replace(elapsed_s=medians[mode])] for mode, done in passes.items()})
    first = passes[False][0].token_ids
    return report._replace(same_tokens=all(one.token_ids == first for done in passes.values() for one in done))


def _bench_dataset(config: BenchConfig, dataset: str, open_engine: OpenEngine) -> "tuple[dict[str, Any], list[Table]]":
    (once,) = config.alone()
    questions = read_questions(dataset, once.num_prompts)
    llm = open_engine(once, once.batch_size[0])
    try:
        every, found = run_questions(llm, once, questions)
    except ValueError as error:
        raise UserError(f"--dataset {dataset}: {error}") from error
    by_category, report = {name: report_of(passes) for name, passes in found.items()}, report_of(every)
    left_out = sum(len(question.turns) for question in questions) - report.num_prompts
    more = {
        "dataset": dataset,
        "temperature": once.temperature,
        "num_left_out": left_out,
        "categories": {name: one.as_dict() for name, one in by_category.items()},
    }
    return report.as_dict() | more, [*tables(report, once), category_table(by_category, report, left_out)]


def _encode(llm: "LLM", config: BenchConfig) -> list[list[int]]:
    tokenizer = tokenizer_of(llm)
    prompts = [tokenizer.encode(text) for text in config.texts()]
    if not prompts:
        raise UserError(f"--prompts {config.prompts}: the file holds no prompt")
    limit = llm.engine.config.max_model_len
    longest = max(map(len, prompts))
    if longest + config.max_tokens > limit:
        message = f"{longest} prompt tokens and --max-tokens {config.max_tokens} exceed the context of {limit}"
        raise UserError(f"{message}: lower --max-tokens")
    return prompts
