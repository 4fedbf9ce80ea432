"""Engines that prepare data sets in other processes: on this machine, and by Spark; Ray's is in `distributed/ray`."""
