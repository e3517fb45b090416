"""The crash path: find dead workers by evidence, declare them dead, end what is left of them, settle their jobs."""
