"""The watchman: finds the dead by evidence, settles what they held, keeps the house."""
