"""What is measured: the catalogue, the counters of one process, and the text that Prometheus reads."""
