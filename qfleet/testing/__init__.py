"""Small environments and stand-ins that tests and examples import."""
