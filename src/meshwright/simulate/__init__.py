"""Services under load: a planned service priced step by step, as the clock of the scheduler that will serve it."""
