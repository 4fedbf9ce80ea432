"""Data sets: their format, where they are, and what is done with them before a learner reads them."""
