"""A child that reports that it is ready, then sleeps."""

import sys
import time

from wingbeat.cluster.child_process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[-1]))
    print("ready", flush=True)
    time.sleep(60)
