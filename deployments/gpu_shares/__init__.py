"""Default shares of GPUs, chosen from the available GPUs if the settings give none."""
