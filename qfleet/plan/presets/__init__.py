"""Presets: settings for environments and for algorithms, as functions that return them."""
