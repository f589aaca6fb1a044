"""Runtime part: engines that start on one machine leave each other the memory that they have reserved."""

from wingbeat.runtime.promises.memory_promises import PROMISES

promised_bytes = PROMISES.untouched
settling = PROMISES.settling
host_zeros = "wingbeat.runtime.promises.host_zeros:mapped_zeros"
