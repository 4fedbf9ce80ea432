"""Measurements that back the claims in the documents. Run one with `scripts/bench NAME`; they are not tests."""
