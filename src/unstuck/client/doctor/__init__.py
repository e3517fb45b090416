"""The doctor: check the whole system, and say for each problem what is wrong, why, and how to fix it.

`diagnose` asks the ledger; everything else is pure: `examine.examine(facts)` returns the findings.
"""
