"""The page that browsers get at `/`: one HTML file, and what serves it."""
