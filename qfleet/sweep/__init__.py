"""Several runs of one plan side by side. The process of a member begins in this package, so it imports nothing."""
