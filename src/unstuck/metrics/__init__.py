"""What is measured: the catalogue, the tallies of one process, and the text that Prometheus reads."""
