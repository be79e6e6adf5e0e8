"""Results of runs: their JSON, tables, figures and intervals."""
