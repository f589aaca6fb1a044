"""Draft heads as the C++ of CPUs reads them."""
