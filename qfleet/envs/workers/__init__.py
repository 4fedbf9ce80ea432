"""Single environments in processes of their own, for environments that are slow or unsafe."""
