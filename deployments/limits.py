"""What a request may ask for where an operator says nothing; settings and the HTTP surface share these."""

MAX_BODY_BYTES = 4 * 2**20
MAX_ANSWER_BYTES = 32 * 2**20
MAX_IMAGES = 4
MAX_AUDIOS = 4
MAX_HELD_MEDIA_BYTES = 2**31
"""Of what is made of images and audio, over all requests of a router that have not ended."""
