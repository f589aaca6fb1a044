"""Publication of engine figures as Ray's metrics."""
