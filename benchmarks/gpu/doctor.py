"""Checks of `wingbeat doctor` on a machine with its GPU: driver, kernels compared with torch, CUDA IPC, CUDA graphs.

benchmarks/gpu/run.sh first --only doctor

Without a GPU, --quick checks the machine alone. A failed check fails this script, a warning does not.
"""

from _harness import FAILED, Bench, Cases, Figure, Result, run

from wingbeat.deployments.doctor.examination import Finding, Verdict, examine
from wingbeat.deployments.doctor.gpu import gpu_parts
from wingbeat.deployments.doctor.machine import machine_parts


def measure(bench: Bench) -> Result:
    """Runs the checks one by one, each with its own time limit."""
    cases = Cases(bench, {"examined": "as by `wingbeat doctor --no-load`"}, {"findings": []})
    details = cases.result.details

    def one(finding: Finding) -> list[Figure]:
        details["findings"].append({**finding._asdict(), "verdict": str(finding.verdict)})
        if finding.verdict is Verdict.FAILED:
            details[FAILED][finding.part] = finding.detail
        return [Figure(f"{finding.part}: {finding.verdict}", finding.seconds, "s")]

    for finding in examine([*machine_parts(), *gpu_parts(bench.device.type == "cuda")]):
        cases.run(finding.part, lambda finding=finding: one(finding))
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
