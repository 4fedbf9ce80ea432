"""The roles of a run on a Ray cluster."""
