"""What concerns the process of a run: signals, its supervisor, calls that hang."""
