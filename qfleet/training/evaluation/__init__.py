"""A policy in other worlds than its own, and on the screen."""
