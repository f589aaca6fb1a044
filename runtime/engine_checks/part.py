"""Runtime part: tests of kernels, captured graphs and drafter at start; imported when a test runs."""

choose_kernels = "wingbeat.runtime.engine_checks.kernel_check:choose_kernels"
check_graphs = "wingbeat.runtime.engine_checks.graph_check:check_graphs"
drafter_check = "wingbeat.runtime.engine_checks.self_test:drafter_check"
