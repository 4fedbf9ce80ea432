"""The worker layer: what every role in another process shares."""
