"""The ZeroMQ door: a Majordomo broker on the ledger, with clients and workers in Python.

`unstuck broker` runs the broker; every request that it takes is a job.
"""

CURE = "The ZeroMQ door needs more packages: pip install 'unstuck[mdp]'."
