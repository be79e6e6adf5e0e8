"""What a plan gives back: report, HTML page, commands, applications of Ray Serve."""
