"""Constants of the seeded noise, identical on every device."""

# Multipliers of triple32, a 32-bit finalizer of three multiply-xorshift rounds found by exhaustive search
# (Chris Wellons, "Prospecting for Hash Functions"; bias 0.0208 against an ideal of 0).
MULTIPLIER_1 = 0xED5AD4BB
MULTIPLIER_2 = 0xAC4C1B51
MULTIPLIER_3 = 0x31848BAB
# Two unrelated lanes give each row a 64-bit key; the third constant separates token hashes from row keys.
LANE_1 = 0x9E3779B9
LANE_2 = 0x85EBCA6B
TOKEN_LANE = 0xC2B2AE35
