"""Finding environments and wrappers by their names."""
