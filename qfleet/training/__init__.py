"""One run on its way: the trainer and the parts it calls."""
