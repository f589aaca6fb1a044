"""Start-up checks of the driver, kernels, captured graphs and drafter."""
