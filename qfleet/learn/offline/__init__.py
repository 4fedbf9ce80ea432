"""Learning from data sets."""
