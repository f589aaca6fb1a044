"""What crosses between verifier and drafter."""
