"""The front door: enqueue, job handles, operator verbs."""
