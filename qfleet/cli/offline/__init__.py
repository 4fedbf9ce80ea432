"""The verbs about data sets."""
