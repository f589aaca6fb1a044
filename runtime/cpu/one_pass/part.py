"""One-pass heads by the C++ of CPUs."""

kernel_head = "wingbeat.runtime.cpu.one_pass.block_heads:kernel_head"
