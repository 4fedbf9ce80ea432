"""From a plan to the components of a run."""
