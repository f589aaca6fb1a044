"""Draft head passes, each of which is one C++ call."""
