"""Token choice: processors, filters, noise."""
