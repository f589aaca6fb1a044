"""Draft trees whose shape a user has drawn; imports what draws them where it is asked for."""

drawn_tree = "wingbeat.runtime.drawn_trees.static_tree:parse_tree"
tree_table = "wingbeat.runtime.drawn_trees.static_table:StaticTable"
