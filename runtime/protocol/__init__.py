"""Messages and channel interface between verifier and drafter."""
