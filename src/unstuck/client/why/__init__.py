"""Tell why a job is where it is: gather what the ledger knows, and put it into plain words in order of time."""
