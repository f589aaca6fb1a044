"""Runtime part: adaptive speculation for rounds that run on C++ kernels."""

host_speculation = "wingbeat.runtime.cpu.adaptive.host_speculation:host_speculation"
