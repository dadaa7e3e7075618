"""Why a plan is as it is, and what other choices would change."""
