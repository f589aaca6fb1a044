"""Values of config files: other spellings of the same value, and impossible numbers."""
