"""What lives in another process."""
