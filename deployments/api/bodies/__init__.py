"""What a request asks for, field by field."""
