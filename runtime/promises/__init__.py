"""Memory that engines of this machine have reserved and not used yet."""
