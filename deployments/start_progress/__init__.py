"""Progress of a start on a terminal: colours, a spinner, and phases that take long."""
