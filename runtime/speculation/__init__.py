"""Policy of speculation as pure functions of measured costs and acceptance: how many levels to draft, how many nodes to
verify."""
