"""One machine: child processes, shared memory, rings, timers, and how often something may be restarted."""
