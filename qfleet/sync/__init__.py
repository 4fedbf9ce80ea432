"""Synchronisation strategies: how several learners keep one set of weights."""
