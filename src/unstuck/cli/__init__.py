"""The handle: the command line."""
