"""Verdict of a session as text: does it work, is text lossless, is speculation faster, which stage is slowest.

A pure function of the parts' results. Questions whose parts were not selected are left out; if a part failed or timed
out, the verdict states that its answer is unknown.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

SWITCHES = {
    "GPU kernels": "`--kernels torch` (`auto`, the default, takes torch's operations where a kernel differs at load)",
    "CUDA graphs": "`--no-cuda-graphs`",
    "CUDA IPC": "`--channel shm` (`auto`, the default, takes host memory where a drafter's trial fails)",
    "speculation": "the drafter `none`",
}
"""Option that avoids a failure, by the failing part."""
ABOUT = {
    "tests_kernels": "GPU kernels",
    "tests_graphs": "CUDA graphs",
    "tests_channel": "CUDA IPC",
    "tests_killed": "CUDA IPC",
    "hop": "CUDA IPC",
}
"""Parts that check the same as one of the doctor's parts."""
EQUAL_TEXT = "{}: equal sequences, speculation on and off"
EQUAL_GRAPHS = "{}: equal outputs, graphs on and off"
"""Names of figures of `losslessness.py`, by dtype."""
ASKED = {"round_stages", "losslessness"}
"""Other scripts whose failure means that something does not work; failures of pure measurements do not."""
EVEN = 0.02
"""Relative difference up to which speeds count as equal."""
HOST_BOUND = 0.05
"""Share of a round for which the host waits; below it, the device is waiting for the host."""


class Part(Protocol):
    """Fields of a part that the verdict reads."""

    name: str
    status: str
    most_s: float
    is_tests: bool
    output: str
    result: dict[str, Any]


class Problem(NamedTuple):
    """Something that did not work."""

    about: str
    """A key of `SWITCHES`, or a name for something that no switch avoids."""
    said: str


def verdict(parts: Sequence[Part]) -> list[str]:
    """Lines of Markdown; empty if no part answers any question."""
    named = {part.name: part for part in parts}
    lines: list[str] = []
    if named.keys() & {"doctor", *ABOUT, *ASKED}:
        lines += _works(named)
    if "losslessness" in named:
        lines += ["", *_lossless(named["losslessness"])]
    if "round_stages" in named:
        rows = _rows(named["round_stages"])
        lines += ["", *_faster(named["round_stages"], rows), "", *_furthest(rows, named.get("hop"))]
    return lines


def _works(named: Mapping[str, Part]) -> list[str]:
    problems, unknown = list(_problems(named)), list(_unknown(named.values()))
    fatal = [problem for problem in problems if problem.about not in SWITCHES]
    lines = [f"- {problem.about}: {problem.said}. No switch avoids it." for problem in fatal]
    for about, switch in SWITCHES.items():
        said = "; ".join(problem.said for problem in problems if problem.about == about)
        lines += [f"- {about}: {said}. Serve with {switch}."] if said else []
    lines += [f"- {line}" for line in unknown]
    finds = [finding for finding in _findings(named) if finding["verdict"] == "warning"]
    lines += [f"- {note['part']}: {note['detail']}." for note in finds if note["part"] not in SWITCHES]
    if fatal:
        head = "**Does it work? No, or not all of it.**"
    elif problems:
        head = "**Does it work? Yes, with the switches below.**"
    elif unknown:
        head = "**Does it work? As far as was asked.**"
    else:
        head = "**Does it work? Yes.** Every check passed."
    return [head, *([""] if lines else []), *lines]


def _findings(named: Mapping[str, Part]) -> list[dict[str, Any]]:
    return named["doctor"].result.get("details", {}).get("findings", []) if "doctor" in named else []


def _problems(named: Mapping[str, Part]) -> Iterator[Problem]:
    for finding in _findings(named):
        if finding["verdict"] == "failed" or (finding["verdict"] == "warning" and finding["part"] in SWITCHES):
            yield Problem(finding["part"], finding["detail"])
    for part in named.values():
        if part.status != "failed" or part.name == "doctor":
            continue
        if part.is_tests:
            yield Problem(ABOUT.get(part.name, part.name), f"{_num_failed(part)} of {part.name} failed")
        elif part.name in ABOUT:
            yield Problem(ABOUT[part.name], f"{part.name} failed{_first_error(part)}")
        elif part.name in ASKED:
            yield Problem(part.name, f"it failed{_first_error(part)}")
    graphs = sorted({line for row in _rows(named.get("round_stages")) for line in row.get("graphs_failed", [])})
    if graphs:
        yield Problem("CUDA graphs", f"{len(graphs)} were not captured and run eagerly, such as {graphs[0]}")
    if "losslessness" in named:
        yield from _changes(named["losslessness"])


def _unknown(parts: Sequence[Part]) -> Iterator[str]:
    for part in parts:
        if part.status == "timed out":
            yield f"{part.name} was cut off after {part.most_s:g} s: what it had not said by then is not known."
        elif part.status in ("no time", "not run"):
            yield f"{part.name} found no time: what it asks is not known."
        elif part.status == "failed" and not part.is_tests and part.name not in {"doctor", *ABOUT, *ASKED}:
            yield f"{part.name} failed{_first_error(part)}: what it measures is not known."


def _num_failed(part: Part) -> str:
    counts = re.findall(r"(\d+) (failed|errors?)\b", part.output.splitlines()[-1] if part.output.strip() else "")
    number = sum(int(count) for count, _ in counts)
    return f"{number} test{'s' * (number != 1)}" if number else "tests"


def _first_error(part: Part) -> str:
    failed = part.result.get("details", {}).get("failed") or {}
    return next((f" at {case}: {reason}" for case, reason in failed.items()), "")


def _values(part: Part) -> dict[str, float]:
    return {figure["name"]: figure["value"] for figure in part.result.get("figures", [])}


def _changes(part: Part) -> Iterator[Problem]:
    """Yields causes of changed text, which must not change."""
    values = _values(part)
    equal = values.get(EQUAL_TEXT.format("float32"), 1.0)
    if equal < 1:
        yield Problem("speculation", f"{equal:.0%} of float32's sequences are equal with it and without")
    for dtype in ("float32", "bfloat16"):
        equal = values.get(EQUAL_GRAPHS.format(dtype), 1.0)
        if equal < 1:
            yield Problem("CUDA graphs", f"{equal:.0%} of {dtype}'s outputs are equal with them and without")


def _lossless(part: Part) -> list[str]:
    values, changes = _values(part), list(_changes(part))
    if changes:
        whose = " and ".join(dict.fromkeys(problem.about for problem in changes))
        return [f"**Is text lossless? No**: it is another one with {whose}, see above."]
    if EQUAL_TEXT.format("float32") not in values or EQUAL_GRAPHS.format("float32") not in values:
        return [f"**Is text lossless? Not known**: losslessness {part.status}{_first_error(part)}."]
    said = "in float32 neither speculation nor graphs change a token"
    half = values.get(EQUAL_TEXT.format("bfloat16"))
    if half is not None:
        said += f"; in bfloat16 {half:.0%} of sequences are equal"
        gap = values.get("bfloat16: largest logit gap at a first difference", 0.0)
        said += f", and where others part, two logits are {gap:.2g} apart at most" if half < 1 else ""
    return [f"**Is text lossless? Yes**: {said}."]


def _rows(part: Part | None) -> list[dict[str, Any]]:
    return [] if part is None else part.result.get("details", {}).get("rows", [])


def _speculating(rows: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Rows with a speed relative to plain decoding, by batch size."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        if "over_plain" in row:
            found.setdefault(row["batch"], []).append(row)
    return found


def _faster(part: Part, rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for batch, kinds in _speculating(rows).items():
        best = max(row["over_plain"] for row in kinds)
        word = "faster" if best > 1 + EVEN else "slower" if best < 1 - EVEN else "as fast"
        each = ", ".join(
            f"{row['kind']} {row['over_plain']:.2f} x at {row['acceptance_length']:.1f} tokens a round" for row in kinds
        )
        advice = "; adaptive speculation, the default, is to decode plainly there" if word == "slower" else ""
        lines.append(f"- batch {batch}: {word} ({each}){advice}.")
    for case, reason in part.result.get("details", {}).get("skipped", {}).items():
        lines.append(f"- {case}: {reason}.")
    if not _speculating(rows):
        why = f"round_stages {part.status}{_first_error(part)}"
        return [f"**Is speculation faster than plain? Not known**: {why}.", *([""] if lines else []), *lines]
    return ["**Is speculation faster than plain?** At the acceptance that was forced:", "", *lines]


def _furthest(rows: list[dict[str, Any]], hop: Part | None) -> list[str]:
    if not rows:
        return ["**Which stage is furthest from its floor? Not known.**"]
    lines = ["**Which stage is furthest from its floor?**", ""]
    for batch in dict.fromkeys(row["batch"] for row in rows):
        lines += [f"- {_slowest(row)}" for row in rows if row["batch"] == batch]
    trip = next((f["value"] for f in _figures(hop) if f["name"] == "round trip by cuda_ipc, to the device"), None)
    if trip is not None:
        lines.append(f"- A drafter in a process of its own: {trip:.0f} us more a round, there and back.")
    stages = list(dict.fromkeys(stage for row in rows for stage in row["stages_ms"] if stage != "rest"))
    stages = [stage for stage in ("draft", "verify", "accept", "publish") if stage in stages] + ["rest"]
    lines += ["", f"| ms / floor | tokens/s | round | {' | '.join(stages)} | host works | host waits |"]
    lines.append(f"| --- |{' ---: |' * (len(stages) + 4)}")
    return lines + [_table_row(row, stages) for row in rows]


def _slowest(row: dict[str, Any]) -> str:
    over = {stage: ms - row["floors_ms"][stage] for stage, ms in row["stages_ms"].items()}
    stage = max(over, key=over.__getitem__)
    ms, floor = row["stages_ms"][stage], row["floors_ms"][stage]
    text = f"batch {row['batch']}, {row['kind']}: {stage}, {ms:.2f} ms where its floor is {floor:.2f}"
    if stage == "rest":
        text += " (small copies, and what the device waits)"
    if row["host_ms"]["wait"] < HOST_BOUND * row["round_ms"]:
        text += f"; the device waits for the host, which works {_host_works(row):.2f} ms of a round"
    return text + "."


def _host_works(row: dict[str, Any]) -> float:
    return sum(ms for phase, ms in row["host_ms"].items() if phase != "wait")


def _table_row(row: dict[str, Any], stages: list[str]) -> str:
    floors = row["floors_ms"]
    cells = [f"{row['tokens_per_s']:.0f}", f"{row['round_ms']:.2f} / {sum(floors.values()):.2f}"]
    for stage in stages:
        ms = row["stages_ms"].get(stage)
        cells.append("-" if ms is None else f"{ms:.2f}" if stage == "rest" else f"{ms:.2f} / {floors[stage]:.2f}")
    cells += [f"{_host_works(row):.2f}", f"{row['host_ms']['wait']:.2f}"]
    return f"| batch {row['batch']}, {row['kind']} | {' | '.join(cells)} |"


def _figures(part: Part | None) -> list[dict[str, Any]]:
    return [] if part is None else part.result.get("figures", [])
