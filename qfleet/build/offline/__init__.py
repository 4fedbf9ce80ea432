"""Runs and data sets: what a plan that names one leaves open, recorded steps in a replay, and recording."""
