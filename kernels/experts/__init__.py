"""Matrix products of rows with the weights of their experts."""
