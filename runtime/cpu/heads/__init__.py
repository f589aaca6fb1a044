"""Draft heads in the form that the C++ kernels read."""
