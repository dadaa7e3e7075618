"""What fails in fleets, and how often: the published ones, and files of a user."""
