"""Verbs that let a run's policy act: `eval` and `play`."""
