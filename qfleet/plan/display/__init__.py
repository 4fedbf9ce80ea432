"""Plans as text and HTML."""
