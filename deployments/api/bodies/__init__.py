"""Request bodies: their fields, and the checks on them."""
