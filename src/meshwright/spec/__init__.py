"""What is asked for, as frozen plain data: models, chips, clusters, strategies, jobs and plan files."""
