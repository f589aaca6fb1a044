"""Grammars that answers must match; imports what compiles them where it is asked for."""

add_nodes = "wingbeat.runtime.grammar.certain_trees:add_certain"
add_nodes_on_host = "wingbeat.runtime.grammar.certain_trees:with_certain"
grammars = "wingbeat.runtime.grammar.compiler:grammars"
