"""Runs a session: GPU tests and scripts of this folder, with one report and a log per part.

Exit status: 0 if all parts ran; 1 if one failed, timed out or had no time left; 2 without a GPU. Missed targets are
marked in the report and do not affect the status.
"""

import argparse
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from _verdict import verdict

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUDGET_S = 570
MOST_S = 120
"""Default time limit of a part in seconds; the budget applies as well."""
TAIL = 2000
"""Characters from the end of a part's log that the report shows; the whole log is in a file."""
NO_GPU, NO_TESTS = 2, 5
DRIVER_S = 90.0
"""Seconds for the driver to answer, including an import of torch from a cold disk."""
TEST_TIMEOUT_S = 60
WORKERS = 8
"""Number of test processes, if pytest-xdist is installed."""


@dataclass
class Part:
    """A command of the suite, with its result."""

    name: str
    command: list[str]
    most_s: float = MOST_S
    is_tests: bool = False
    status: str = "not run"
    """ok, failed, timed out, or "no time" if the budget was spent before the part began."""
    wall_s: float = 0.0
    output: str = ""
    """End of the log: of a failed script, and always of tests."""
    result: dict[str, Any] = field(default_factory=dict)
    """Last object that a script printed; for a script that timed out or failed in one case, its measurements so far."""


def run_part(part: Part, left_s: float, out: Path) -> None:
    """Runs one part within the remaining budget, with its log in `out`; never raises for errors of the part."""
    if left_s < 5:
        part.status = "no time"
        return
    started, log = time.monotonic(), out / f"{part.name}.log"
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                part.command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=min(part.most_s, left_s),
                check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = None
    text = log.read_text(encoding="utf-8", errors="replace")
    part.result = {} if part.is_tests else last_object(text)
    good = code in ((0, NO_TESTS) if part.is_tests else (0,)) and (part.is_tests or bool(part.result))
    part.status = "timed out" if code is None else "ok" if good else "failed"
    part.output = text[-TAIL:] if part.is_tests or not good else ""
    part.wall_s = round(time.monotonic() - started, 1)


def last_object(text: str) -> dict[str, Any]:
    """JSON object that a script printed: its whole output, or the last line that is an object.

    Empty if there is none.
    """
    for candidate in (text, *reversed(text.splitlines())):
        try:
            value = json.loads(candidate)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict):
            return value
    return {}


def pytest_part(name: str, paths: Sequence[str], most_s: float, *, only: str = "", workers: int = WORKERS) -> Part:
    """Tests of some folders or files, each test with its own timeout, so that a hanging test affects itself alone.

    Args:
        only: options that select tests.
        workers: number of processes; 1 for tests that need the GPU to themselves.
    """
    options = ["-o", "addopts=", "--import-mode=importlib", "-ra", "--tb=short", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("pytest_timeout"):
        options.append(f"--timeout={TEST_TIMEOUT_S}")
    if workers > 1 and importlib.util.find_spec("xdist"):
        options += ["-n", str(workers)]
    command = [sys.executable, "-m", "pytest", *options, *shlex.split(only), *paths]
    return Part(name, command, most_s, is_tests=True)


def gpu_files(folder: str) -> list[str]:
    """Files of a folder that contain tests for a GPU."""
    paths = sorted((ROOT / folder).rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if "mark.gpu" in path.read_text()]


def script(name: str, most_s: float = MOST_S, *options: str) -> Part:
    """Part that runs a script of this folder."""
    return Part(name, [sys.executable, str(HERE / f"{name}.py"), *options], most_s)


def scripts(name: str, most_s: float, *options: str) -> list[Part]:
    """Part that runs a script of an optional feature; empty if the feature is deleted."""
    return [script(name, most_s, *options)] if (HERE / f"{name}.py").is_file() else []


def cases(name: str, most_s: float) -> list[Part]:
    """Part with cases in which a GPU must compute as a CPU does; empty if their feature is deleted."""
    path = f"tests/gpu_of_numbers/{name}_cases.py"
    return [pytest_part(f"{name}_cases", [path], most_s, only="-m ''", workers=1)] if (ROOT / path).is_file() else []


def sessions() -> dict[str, list[Part]]:
    """Parts of each session by name, most important first; each session fits the budget."""
    ipc = gpu_files("tests/cluster")
    return {
        "first": [
            *scripts("doctor", 90),
            script("round_stages", 200),
            script("losslessness", 60),
            pytest_part("tests_graphs", ["tests/runtime/graphs"], 45, only="-m gpu", workers=1),
            # All kernel tests, compiled: elsewhere their odd shapes only run in Triton's interpreter.
            pytest_part("tests_kernels", ["tests/kernels"], 110, only="-m 'not slow'"),
            *scripts("hop", 40),
            pytest_part("tests_runtime", gpu_files("tests/runtime"), 70, only="-m 'gpu and not ray'", workers=6),
            pytest_part("tests_channel", ipc, 50, only="-m gpu -k 'not behind_its_doorbell'", workers=1),
            # Last and alone: a hanging stream would take the other tests with it.
            pytest_part("tests_killed", ipc, 50, only="-m gpu -k behind_its_doorbell", workers=1),
        ],
        "speed": [
            script("engine_speed", 240),
            script("kernel_profile", 150),
            script("plain_decode", 110),
            script("verify", 70),
            script("draft_round", 60),
            script("draft_level", 50),
            script("attention", 50),
            script("bandwidth", 30),
        ],
        "peers": [*scripts("hop", 60), *scripts("two_processes", 200), script("plain_decode", 300, "--peer")],
        "served": [script("served_8b", 240), script("served", 200), script("prompt_rounds", 90)],
        "next": [
            *scripts("doctor", 40),
            script("real_acceptance", 160),
            script("kernel_profile", 80, "--only", "prompt", "fp8"),
            *scripts("adapter_profile", 40),
            script("served_8b", 130, "--only", "start", "64 at once", "killed"),
            script("moe", 60),
            *scripts("two_processes", 60, "--only", "batch 1,"),
            *cases("pair", 70),
            pytest_part("tests_channel", ipc, 50, only="-m gpu -k 'not behind_its_doorbell'", workers=1),
        ],
        "next2": [
            *scripts("deterministic", 200),
            script("plain_decode", 110, "--peer"),
            script("peers_spec", 80),
            script("attention", 50, "--only", "fp8", "GQA", "dim"),
            *scripts("packed_weights", 130),
        ],
        "kinds": [
            *scripts("drafter_kinds", 240),
            *(part for name in ("engine", "drafter", "pair", "adapter") for part in cases(name, 95)),
            *cases("alike", 80),
            *cases("packed", 60),
        ],
    }


def script_parts(folder: Path, quick: bool) -> list[Part]:
    """Parts for every script of a folder; files that begin with an underscore are not scripts."""
    options = ["--quick"] if quick else []
    paths = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_")]
    return [Part(path.stem, [sys.executable, str(path), *options]) for path in paths]


def machine() -> dict[str, str]:
    """Facts about hardware, driver and versions."""
    facts = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "python": platform.python_version()}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    for name, command in {"gpu": query, "commit": ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]}.items():
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            facts[name] = done.stdout.strip() or "unknown"
        except (FileNotFoundError, subprocess.TimeoutExpired):
            facts[name] = "unknown"
    facts["cpu"] = f"{platform.machine()}, {os.cpu_count()} cores"
    for package in ("torch", "triton", "transformers"):
        facts[package] = metadata.version(package) if importlib.util.find_spec(package) else "missing"
    return facts


def why_none() -> str | None:
    """Reason why no GPU can be measured; None if torch sees one.

    A child process asks the driver, because a hanging driver would block this process forever.
    """
    import torch

    from wingbeat.cluster.gpu_driver import unseen_gpus

    question = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.is_available())"]
    process = subprocess.Popen(question, stdout=subprocess.PIPE, text=True)
    try:
        if process.communicate(timeout=DRIVER_S)[0].startswith("True"):
            return None
    except subprocess.TimeoutExpired:
        process.kill()  # without a wait: a process that hangs in the driver survives SIGKILL
        return f"the driver does not answer within {DRIVER_S:.0f} s"
    unseen = unseen_gpus(torch.__version__, torch.version.cuda)
    return unseen or f"torch {torch.__version__} sees none: everything runs on the CPU"


def target(figure: dict[str, Any]) -> str:
    """Target of a figure, and whether it was met; empty without a target."""
    if figure.get("at_most") is not None:
        return f"at most {figure['at_most']:g}: {'met' if figure['value'] <= figure['at_most'] else 'missed'}"
    if figure.get("at_least") is not None:
        return f"at least {figure['at_least']:g}: {'met' if figure['value'] >= figure['at_least'] else 'missed'}"
    return ""


def markdown(facts: dict[str, str], parts: Sequence[Part], quick: bool) -> str:
    """Report as markdown."""
    lines = ["# GPU benchmarks", ""]
    if quick:
        lines += ["Toy sizes (--quick): these figures measure nothing.", ""]
    lines += [f"- {name}: {fact}" for name, fact in facts.items()]
    lines += ["", "| part | status | seconds |", "| --- | --- | ---: |"]
    lines += [f"| {part.name} | {part.status} | {part.wall_s} |" for part in parts]
    for part in parts:
        if part.result:
            lines += ["", f"## {part.name}", ""]
            lines += [f"- {name}: {fact}" for name, fact in part.result.get("facts", {}).items()]
            lines += ["", "| figure | value | unit | target |", "| --- | ---: | --- | --- |"]
            lines += [
                f"| {figure['name']} | {figure['value']:.4g} | {figure['unit']} | {'' if quick else target(figure)} |"
                for figure in part.result.get("figures", [])
            ]
        if part.output:
            lines += ["", f"## {part.name}: end of its output", "", "```", part.output.strip(), "```"]
    words = verdict(parts)
    if words:
        lines += ["", "## Verdict", ""]
        lines += ["Toy sizes: this is how a verdict reads, and says nothing of this machine.", ""] if quick else []
        lines += words
    return "\n".join(lines) + "\n"


def run_suite(parts: Sequence[Part], out: Path, budget_s: float, quick: bool = False) -> int:
    """Runs parts in order, writing gpu.json and gpu.md after each; returns the exit status."""
    facts, deadline = machine(), time.monotonic() + budget_s
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        run_part(part, deadline - time.monotonic(), out)
        print(f"{part.name}: {part.status}, {part.wall_s} s", flush=True)
        # Written after every part, so that measurements survive whatever ends the suite.
        report = {"machine": facts, "quick": quick, "parts": [asdict(part) for part in parts]}
        (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (out / "gpu.md").write_text(markdown(facts, parts, quick), encoding="utf-8")
    print(markdown(facts, parts, quick))
    print(f"written: {out / 'gpu.json'} and gpu.md")
    return 0 if all(part.status == "ok" for part in parts) else 1


def main() -> int:
    """Parses the options and runs the session."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("session", nargs="?", default="first", choices=tuple(sessions()))
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts of the session to run")
    parser.add_argument("--quick", action="store_true", help="every script at toy sizes on any device, no tests")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds after which no part begins")
    args = parser.parse_args()
    why = None if args.quick else why_none()
    if why is not None:
        print(f"run.sh: no CUDA GPU found, nothing measured (--quick runs toy sizes anywhere): {why}", file=sys.stderr)
        return NO_GPU
    parts = script_parts(HERE, quick=True) if args.quick else sessions()[args.session]
    unknown = set(args.only or ()) - {part.name for part in parts}
    if unknown:
        parser.error(f"--only {' '.join(sorted(unknown))}: known parts are {', '.join(part.name for part in parts)}")
    chosen = [part for part in parts if args.only is None or part.name in args.only]
    return run_suite(chosen, Path(os.environ.get("OUT") or HERE.parent / "results"), args.budget_s, args.quick)


if __name__ == "__main__":
    sys.exit(main())
