"""Passes of draft heads on CPUs; each pass is one C++ call."""
