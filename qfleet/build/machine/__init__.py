"""What this machine is good at: measured once, kept for the user, and used by every run."""
