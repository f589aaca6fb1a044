"""Runs the GPU tests and every script beside it, and merges what they print into one report.

Exit status: 0 when all parts ran, 1 when one failed, was cut off or found no time, 2 without a GPU. Missed targets are
marked in the report and do not fail it.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TESTS = "tests"
BUDGET_S = 570
MOST_S = {"tests": 240, "plain_decode": 240, "two_processes": 150, "engine_speed": 420}
"""Seconds of a part, 120 where it is not named; the budget holds as well."""
TAIL = 2000
"""Characters of output kept of a part that failed."""
NO_GPU, NO_TESTS = 2, 5


@dataclass
class Part:
    """One command of the suite and what became of it."""

    name: str
    command: list[str]
    most_s: float = 120
    status: str = "not run"
    """ok, failed, timed out, or "no time" where the budget was spent before it began."""
    wall_s: float = 0.0
    output: str = ""
    """The end of it, where it failed; of the tests always."""
    result: dict[str, Any] = field(default_factory=dict)


def run_part(part: Part, left_s: float) -> None:
    """Run one part within what is left of the budget; never raises for what the part does."""
    if left_s < 5:
        part.status = "no time"
        return
    started = time.monotonic()
    try:
        done = subprocess.run(
            part.command, cwd=ROOT, capture_output=True, text=True, timeout=min(part.most_s, left_s), check=False
        )
    except subprocess.TimeoutExpired as error:
        part.status = "timed out"
        output = _text(error.stdout)
        part.result, part.output = last_object(output), (output + _text(error.stderr))[-TAIL:]
    else:
        is_tests = part.name == TESTS
        part.result = {} if is_tests else last_object(done.stdout)
        good = done.returncode in ((0, NO_TESTS) if is_tests else (0,)) and (is_tests or bool(part.result))
        part.status = "ok" if good else "failed"
        part.output = (done.stdout + done.stderr)[-TAIL:] if is_tests or not good else ""
    part.wall_s = round(time.monotonic() - started, 1)


def last_object(text: str) -> dict[str, Any]:
    """The JSON object a script printed: all of its output, or the last line that is one; empty where there is none."""
    for candidate in (text, *reversed(text.splitlines())):
        try:
            value = json.loads(candidate)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict):
            return value
    return {}


def _text(stream: str | bytes | None) -> str:
    return stream.decode(errors="replace") if isinstance(stream, bytes) else stream or ""


def test_part() -> Part:
    """The GPU tests of the layers that need no Ray."""
    folders = [ROOT / "tests" / layer for layer in ("kernels", "runtime", "cluster")]
    paths = [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    files = [str(path.relative_to(ROOT)) for path in paths if "mark.gpu" in path.read_text()]
    options = ["-m", "gpu and not ray", "-q", "-p", "no:cacheprovider"]
    return Part(TESTS, [sys.executable, "-m", "pytest", *options, *files], MOST_S[TESTS])


def script_parts(folder: Path, quick: bool) -> list[Part]:
    """Every script of a folder, those that may take longest last; names that begin with an underscore are none."""
    options = ["--quick"] if quick else []
    parts = [
        Part(path.stem, [sys.executable, str(path), *options], MOST_S.get(path.stem, Part.most_s))
        for path in sorted(folder.glob("*.py"))
        if not path.name.startswith("_")
    ]
    return sorted(parts, key=lambda part: part.most_s)


def machine() -> dict[str, str]:
    """Hardware, driver and versions."""
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


def verdict(figure: dict[str, Any]) -> str:
    """Target and whether it was met; empty without one."""
    if figure.get("at_most") is not None:
        return f"at most {figure['at_most']:g}: {'met' if figure['value'] <= figure['at_most'] else 'missed'}"
    if figure.get("at_least") is not None:
        return f"at least {figure['at_least']:g}: {'met' if figure['value'] >= figure['at_least'] else 'missed'}"
    return ""


def markdown(facts: dict[str, str], parts: Sequence[Part], quick: bool) -> str:
    """The report to read."""
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
                f"| {figure['name']} | {figure['value']:.4g} | {figure['unit']} | {'' if quick else verdict(figure)} |"
                for figure in part.result.get("figures", [])
            ]
        if part.output:
            lines += ["", f"## {part.name}: end of its output", "", "```", part.output.strip(), "```"]
    return "\n".join(lines) + "\n"


def run_suite(parts: Sequence[Part], out: Path, budget_s: float, quick: bool = False) -> int:
    """Run parts in order, write gpu.json and gpu.md after each one; the exit status."""
    facts, deadline = machine(), time.monotonic() + budget_s
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        run_part(part, deadline - time.monotonic())
        print(f"{part.name}: {part.status}, {part.wall_s} s", flush=True)
        # Written every time: what was measured survives whatever ends the suite.
        report = {"machine": facts, "quick": quick, "parts": [asdict(part) for part in parts]}
        (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (out / "gpu.md").write_text(markdown(facts, parts, quick), encoding="utf-8")
    print(markdown(facts, parts, quick))
    print(f"written: {out / 'gpu.json'} and gpu.md")
    return 0 if all(part.status == "ok" for part in parts) else 1


def main() -> int:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts to run: tests, or the names of scripts")
    parser.add_argument("--quick", action="store_true", help="toy sizes on any device, without the tests")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds after which no part begins")
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available() and not args.quick:
        print("run.sh: no CUDA GPU found, nothing measured (--quick runs toy sizes anywhere)", file=sys.stderr)
        return NO_GPU
    parts = [*([] if args.quick else [test_part()]), *script_parts(HERE, args.quick)]
    unknown = set(args.only or ()) - {part.name for part in parts}
    if unknown:
        parser.error(f"--only {' '.join(sorted(unknown))}: known parts are {', '.join(part.name for part in parts)}")
    chosen = [part for part in parts if args.only is None or part.name in args.only]
    return run_suite(chosen, Path(os.environ.get("OUT") or HERE.parent / "results"), args.budget_s, args.quick)


if __name__ == "__main__":
    sys.exit(main())
