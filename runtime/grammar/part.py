"""Hooks of the grammar part; the compiler is imported on first use."""

add_nodes = "wingbeat.runtime.grammar.certain_trees:add_certain"
add_nodes_on_host = "wingbeat.runtime.grammar.certain_trees:with_certain"
grammars = "wingbeat.runtime.grammar.compiler:grammars"
