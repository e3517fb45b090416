"""Alerts: what is worth a word is told to people's own channels, gathered, once, and never in anybody's way.

`sender` runs the rounds; `conditions` finds what lasts; `batching` decides when to speak; `bookkeeping` remembers who
was told; `message` finds the words; `targets`, `webhook` and `apprise_target` carry them.
"""
