"""Registers draft trees of user-defined shape; imports their code on use."""

drawn_tree = "wingbeat.runtime.drawn_trees.static_tree:parse_tree"
tree_table = "wingbeat.runtime.drawn_trees.static_table:StaticTable"
