"""Alerts: send what operators must know to their own channels, grouped, once, and without holding up anything else.

`sender` runs the rounds, `conditions` finds what lasts, `delivery` decides what is sent next, `message` writes the
text, `targets` and `webhook` deliver it.
"""
