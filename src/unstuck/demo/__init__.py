"""The demo: a fleet that is killed with kill -9 and loses nothing."""
