"""The worker protocol over HTTP."""
