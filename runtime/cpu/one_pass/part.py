"""Runtime part: one-pass heads on C++ kernels."""

kernel_head = "wingbeat.runtime.cpu.one_pass.kernel_block:kernel_head"
