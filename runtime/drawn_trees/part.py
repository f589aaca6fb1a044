"""Registers draft trees of user-defined shape; the code of such trees is imported when used."""

drawn_tree = "wingbeat.runtime.drawn_trees.static_tree:parse_tree"
tree_table = "wingbeat.runtime.drawn_trees.static_table:StaticTable"
