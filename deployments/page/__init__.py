"""The playground page at `/`: HTML, style and script, and the route that serves it."""
