"""Engine directories: how they are built, and what is in them."""
