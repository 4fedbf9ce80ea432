"""The history of a run's operations, and its checks."""
