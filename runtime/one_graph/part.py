"""Registers rounds in one graph; their code is imported when a drafter joins an engine in its process."""

whole_rounds = "wingbeat.runtime.one_graph.whole_rounds:whole_rounds"
num_whole_rounds = "wingbeat.runtime.one_graph.whole_rounds:num_whole_rounds"
