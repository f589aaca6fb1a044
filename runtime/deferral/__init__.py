"""Messages to an idle drafter, kept back while no trees are requested."""
