"""Grammars that answers must match; imports what compiles them where it is asked for."""

add_certain = "wingbeat.runtime.grammar.certain_trees:add_certain"
with_certain = "wingbeat.runtime.grammar.certain_trees:with_certain"
grammars = "wingbeat.runtime.grammar.compiler:grammars"
