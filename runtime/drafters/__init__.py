"""Drafters: kinds behind one interface, imported only when asked for."""
