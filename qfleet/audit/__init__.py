"""The history of a run's operations."""
