"""Several models behind one endpoint."""
