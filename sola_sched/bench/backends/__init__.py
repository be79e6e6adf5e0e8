"""What a workload runs on: an engine in this process, a server over HTTP, or virtual time."""
