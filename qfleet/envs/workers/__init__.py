"""Single environments in worker processes, for slow or unsafe environments."""
