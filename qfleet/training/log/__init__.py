"""What a run reports: rows, events, status, warnings, times."""
