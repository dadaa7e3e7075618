"""Services under load, priced step by step as the clock of their scheduler, and fleets that train while parts fail."""
