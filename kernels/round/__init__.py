"""Operations of a verifier's round besides the forward pass: tree checks, node placement, settling accepted paths."""
