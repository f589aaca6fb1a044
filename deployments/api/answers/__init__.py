"""What is written back: whole answers, streams and their details."""
