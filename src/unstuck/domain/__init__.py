"""The rules, pure: no I/O, no clock of their own, no database."""
