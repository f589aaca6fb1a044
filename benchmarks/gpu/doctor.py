"""What `wingbeat doctor` examines of a machine and its GPU: driver, kernels held against torch, CUDA IPC, CUDA graphs.

benchmarks/gpu/run.sh first --only doctor

Without a GPU, --quick examines the machine alone. A part that has failed fails this script, a warning does not.
"""

from _harness import FAILED, Bench, Cases, Figure, Result, run

from wingbeat.deployments.doctor.examination import Finding, Verdict, examine
from wingbeat.deployments.doctor.gpu import gpu_parts
from wingbeat.deployments.doctor.machine import machine_parts


def measure(bench: Bench) -> Result:
    """Part by part, each with a limit of its own."""
    cases = Cases(bench, {"examined": "as by `wingbeat doctor --no-load`"}, {"findings": []})
    details = cases.result.details

    def one(finding: Finding) -> list[Figure]:
        details["findings"].append({**finding._asdict(), "verdict": str(finding.verdict)})
        if finding.verdict is Verdict.FAILED:
            details[FAILED][finding.part] = finding.detail
        return [Figure(f"{finding.part}: {finding.verdict}", finding.seconds, "s")]

    for finding in examine([*machine_parts(), *gpu_parts()]):
        cases.run(finding.part, lambda finding=finding: one(finding))
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
