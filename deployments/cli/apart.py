"""The checks that need torch, in a process of their own: the command would keep some 280 MB of imports while it serves.

    python -m wingbeat.deployments.cli.apart FD

Settings come in on the standard input; what is wrong goes out through the file descriptor.
"""

import os
import pickle
import subprocess
import sys

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli.preflight import PreflightError
from wingbeat.runtime.interpreter import module_command, module_environment


def check_apart(config: AppConfig, here: bool) -> None:
    """`checkpoint_checks.check_models` in another process.

    Raises:
        PreflightError: one line that names the setting, the file or the tensor, or what has ended the process.
    """
    ours, theirs = os.pipe()
    with open(ours, encoding="utf-8") as said:
        try:
            done = subprocess.run(
                module_command(__name__, theirs),
                input=pickle.dumps((config, here)),
                pass_fds=(theirs,),
                env=module_environment(),
                check=False,
            )
        finally:
            os.close(theirs)
        problem = said.read()
    if problem:
        raise PreflightError(problem)
    if done.returncode != 0:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        raise PreflightError(f"the check of the checkpoints has ended by {how}: see the lines above, and the memory")


def main() -> None:
    """Check, and say what is wrong."""
    config, here = pickle.load(sys.stdin.buffer)
    from wingbeat.deployments.cli.checkpoint_checks import check_models

    with open(int(sys.argv[1]), "w", encoding="utf-8") as problem:
        try:
            check_models(config, here)
        except (ValueError, OSError) as error:
            problem.write(str(error) or type(error).__name__)


if __name__ == "__main__":
    main()
