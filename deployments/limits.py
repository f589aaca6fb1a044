"""What a request may ask for where an operator says nothing; settings and the HTTP surface share these."""

MAX_BODY_BYTES = 4 * 2**20
MAX_ANSWER_BYTES = 32 * 2**20
