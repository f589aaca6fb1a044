"""C++ on CPUs; imports it where a hook is asked for what runs there."""

draft_passes = "wingbeat.runtime.cpu.drafting.kernel_passes:draft_passes"
host_round = "wingbeat.runtime.cpu.round.runner:host_round"
