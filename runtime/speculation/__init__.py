"""Pure decisions: how much to speculate."""
