"""The doctor: look at the whole system, and say for each thing that is wrong what, why and the cure.

`gathering` asks the ledger, everything else is pure: `examining.examine(facts)` gives the findings.
"""
