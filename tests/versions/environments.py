"""Environments that hold Wingbeat's wheel and what it requires, and nothing that is in extras alone.

python -m tests.versions.environments FOLDER [lowest] [newest]
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

from tests.versions.bounds import ROOT, dependencies, lowest, pins

STEPS = Path(__file__).with_name("exercise.py")
WHEEL_COMMAND = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet")


def build_wheel(output: Path) -> Path:
    """The wheel of this tree, of a copy without build folders, by what is installed."""
    copy = output / "tree"
    # The links in it are relative, to the folders beside it.
    shutil.copytree(ROOT / "src" / "wingbeat", copy / "src" / "wingbeat", symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "kernels", "runtime", "cluster", "deployments", "examples"):
        (copy / name).symlink_to(ROOT / name)
    run([sys.executable, "-m", "pip", *WHEEL_COMMAND, "--wheel-dir", str(output), str(copy)])
    (built,) = output.glob("wingbeat-*.whl")
    return built


def installed_alone(folder: Path, wheel: Path) -> Path:
    """An environment of this one's distributions that the wheel requires, by links; the path of its Python.

    Distributions of extras are absent: for `import`, for `find_spec` and for metadata, in every process.
    """
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    (packages,) = folder.glob("lib/python*/site-packages")
    for found in required_distributions("wingbeat"):
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link, target = packages / top, Path(str(found.locate_file(top)))
            if not link.exists() and target.exists():
                link.symlink_to(target)
        _write_scripts(found, folder / "bin")
    python = folder / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "-q", str(wheel)])
    return python


def required_distributions(root: str) -> list[Distribution]:
    """Distributions that `root` requires without extras, directly or indirectly; without `root` itself."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting: list[tuple[str, frozenset[str]]] = [(root, frozenset())]
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found[name] = distribution(name)
        for requirement in map(Requirement, found[name].requires or ()):
            if any(_applies(requirement, extra) for extra in {"", *extras}):
                waiting.append((normalised(requirement.name), frozenset(requirement.extras)))
    return [held for name, held in found.items() if name != root]


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def only_in_extras() -> set[str]:
    """Names of the installed distributions that Wingbeat does not require."""
    required = {normalised(found.name) for found in required_distributions("wingbeat")}
    return {normalised(found.name) for found in distributions()} - required - {"wingbeat"}


def normalised(name: str) -> str:
    """As PEP 503 has it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _write_scripts(found: Distribution, folder: Path) -> None:
    """Console scripts: those that are installed name another environment's Python."""
    for script in found.entry_points.select(group="console_scripts"):
        module, _, function = script.value.partition(" ")[0].partition(":")
        file = folder / script.name
        first = function.partition(".")[0]
        file.write_text(f"#!{folder / 'python'}\nimport sys\nfrom {module} import {first}\nsys.exit({function}())\n")
        file.chmod(0o755)


def by_pip(folder: Path, wheel: Path, requirements: Iterable[str]) -> Path:
    """An environment that pip fills: the wheel, and requirements beside its own; the path of its Python.

    Where there is no NVIDIA GPU, constraints/cpu.txt says which torch: any other one brings gigabytes of CUDA.
    """
    run([sys.executable, "-m", "venv", "--clear", str(folder)])
    python = folder / "bin" / "python"
    constraints = [] if has_gpu() else ["--constraint", str(ROOT / "constraints" / "cpu.txt")]
    run([str(python), "-m", "pip", "install", "--quiet", *constraints, str(wheel), *requirements])
    return python


def has_gpu() -> bool:
    """As the Makefile asks."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def run(command: list[str], **options: object) -> None:
    """Raises RuntimeError with what a command said, where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")


def main(folder: Path, kinds: list[str]) -> int:
    """Make environments and run every step in each; how many of them failed."""
    shutil.rmtree(folder, ignore_errors=True)
    wheel = build_wheel(folder / "wheel")
    chosen = {"lowest": lowest(dependencies(), {} if has_gpu() else pins()), "newest": []}
    failed = 0
    for kind in kinds or chosen:
        python = by_pip(folder / kind, wheel, chosen[kind])
        subprocess.run([str(python), "-m", "pip", "list", "--format=freeze"], check=True)
        # Not from the checkout, whose folders Python would find first.
        done = subprocess.run([str(python), "-P", str(STEPS)], check=False, cwd=folder)
        print(f"{kind}: {'failed' if done.returncode else 'passed'}", flush=True)
        failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
