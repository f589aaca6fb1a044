"""Runtime part: adaptive speculation of rounds on C++ kernels."""

host_speculation = "wingbeat.runtime.cpu.adaptive.host_speculation:host_speculation"
