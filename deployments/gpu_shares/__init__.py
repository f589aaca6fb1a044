"""Default GPU shares. If the settings give no shares, they are chosen for the available GPUs."""
