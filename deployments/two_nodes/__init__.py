"""A verifier and its drafter on two nodes."""
