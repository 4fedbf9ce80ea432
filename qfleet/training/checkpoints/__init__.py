"""The state of a run to and from its checkpoints."""
