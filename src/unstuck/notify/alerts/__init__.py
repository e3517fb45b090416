"""Alerts: send what operators must know to their own channels, grouped, once, and without holding up anything else.

`sender` runs the rounds; `conditions` finds what lasts; `batching` decides when to speak; `bookkeeping` remembers who
was told; `message` finds the words; `targets`, `webhook` and `apprise_target` carry them.
"""
