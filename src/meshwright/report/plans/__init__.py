"""Pictures of plans and of predictions."""
