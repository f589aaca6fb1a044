"""`wingbeat doctor`: reports whether a machine can serve, in a form that can be pasted into an issue."""

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from transformers.utils import logging as transformers_logging

from wingbeat.deployments.doctor.driver import sees_gpu
from wingbeat.deployments.doctor.examination import Finding, Part, Verdict, examine
from wingbeat.deployments.doctor.gpu import gpu_parts
from wingbeat.deployments.doctor.machine import machine_parts
from wingbeat.deployments.doctor.options import DoctorConfig
from wingbeat.deployments.doctor.rounds import round_estimate
from wingbeat.deployments.local.engine import OpenEngine
from wingbeat.runtime.engine_checks.bounded_step import StepTimeout
from wingbeat.runtime.scheduling.request import SamplingParams

if TYPE_CHECKING:
    from wingbeat.runtime.llm import LLM

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "bold red"}
_LOAD_S, _ROUND_S, _NUM_TOKENS = 1800.0, 300.0, 16


def doctor_command(config: DoctorConfig, as_json: bool, open_engine: OpenEngine) -> int:
    """Print one line for each check; returns 1 if at least one check has failed, else 0."""
    transformers_logging.set_verbosity_error()
    findings = list(_shown(examine(_parts(config, open_engine)), as_json))
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings]))
    return int(any(finding.verdict is Verdict.FAILED for finding in findings))


def _parts(config: DoctorConfig, open_engine: OpenEngine) -> Iterator[Part]:
    """Yield the checks to run.

    If the GPU's driver does not answer, the check of the driver is the last, because all later checks use the driver.
    """
    yield from machine_parts()
    try:
        seen = sees_gpu()
    except StepTimeout as error:
        told = str(error)
        yield Part("driver", 30, lambda: (Verdict.FAILED, told))
        return
    yield from gpu_parts(seen)
    if config.load:
        opened: list[LLM] = []

        def open_once(settings: DoctorConfig, most: int) -> "LLM":
            opened.append(open_engine(settings, most))
            return opened[0]

        yield Part("model", _LOAD_S, lambda: _written(config, open_once))
        if opened and config.engine_dir is None:  # a TensorRT engine does not state how many bytes a round reads
            yield Part("round", _ROUND_S, lambda: (Verdict.OK, round_estimate(opened[0]).sentence()))


def _shown(findings: Iterable[Finding], as_json: bool) -> Iterator[Finding]:
    """Print each finding as soon as it is known, because a check may take minutes, and yield it again."""
    console = Console(soft_wrap=True, highlight=False)
    for finding in findings:
        if not as_json:
            verdict = f"[{_STYLES[finding.verdict]}]{finding.verdict:<7}[/]"
            console.print(f"{verdict} {finding.part:<12} {finding.seconds:6.1f} s  ", end="")
            console.print(finding.detail, markup=False)
        yield finding


def _written(config: DoctorConfig, open_engine: OpenEngine) -> tuple[Verdict, str]:
    """Load the model, generate some tokens, and return a verdict and a sentence.

    Loading the model also compares its logits with those of transformers, compares its captured graphs with eager
    rounds, and tests the drafter.
    """
    llm = open_engine(config, 1)
    loaded, test = llm.engine.loaded, llm.self_test
    said = f"{loaded.name} in {str(loaded.dtype).removeprefix('torch.')} on {loaded.device}"
    params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
    (answer,) = llm.generate([[loaded.vocab_size // 2]], [params])
    said += f", {len(answer.token_ids)} tokens written"
    graphs = llm.engine.runner.graphs
    if graphs is not None:
        stats = graphs.stats
        said += f", {len(stats.captured)} CUDA graphs captured"
        if graphs.pool.paused or stats.failed:
            return Verdict.WARNING, f"{said}, but {'all' if graphs.pool.paused else len(stats.failed)} run eagerly"
    if test is not None:
        said += f", drafter accepted {test.first_position:.0%} at the first position"
    return Verdict.OK, said
