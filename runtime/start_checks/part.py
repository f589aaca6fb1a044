"""Runtime part: tests of kernels, captured graphs and drafter at start; imported when a test runs."""

choose_kernels = "wingbeat.runtime.start_checks.kernel_check:choose_kernels"
check_graphs = "wingbeat.runtime.start_checks.graph_check:check_graphs"
drafter_check = "wingbeat.runtime.start_checks.self_test:drafter_check"
