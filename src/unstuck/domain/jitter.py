"""Draw the random part of pauses.

The generator of the module `random` belongs to the app. If our threads drew from it, an app that seeds it would draw
other numbers in each run."""

import os
import random

jitter = random.Random()
if hasattr(os, "register_at_fork"):
    # As `random` does: processes that were forked must not pause alike.
    os.register_at_fork(after_in_child=jitter.seed)
