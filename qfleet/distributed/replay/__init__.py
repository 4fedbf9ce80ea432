"""A replay in a process of its own."""
