"""The watchman: finds the dead and settles what they held."""
