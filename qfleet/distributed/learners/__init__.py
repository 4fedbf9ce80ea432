"""Several learners."""
