"""Checking a plan: settings that do not go together, rules over several settings, and settings without effect."""
