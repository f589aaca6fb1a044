"""The learner's own process, which runs at the lowest priority, with one thread and without GPU."""

import json
import logging
import os
import signal
import sys

import torch

from wingbeat.cluster.child_process import die_with_parent, show_stacks
from wingbeat.deployments.log import show_log
from wingbeat.runtime.learning.learner import Learner
from wingbeat.runtime.learning.settings import LearnerSettings

logger = logging.getLogger(__name__)
NICENESS = 19
"""Lowest priority of the normal scheduling class. The idle scheduling class is not used: the process might then get no
CPU time while it holds locks, and other processes would wait for the locks.
"""


def main() -> None:
    """Train until the replica that started this process is gone."""
    fd, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    show_log()
    show_stacks()
    with os.fdopen(fd) as pipe:
        settings = LearnerSettings(**json.load(pipe))
    os.nice(NICENESS)
    os.umask(0o077)  # heads and figures derive from users' texts
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as for `wingbeat train`
    torch.manual_seed(0)
    logger.info("the learner works in %s", settings.root)
    Learner(settings).run()


if __name__ == "__main__":
    main()
