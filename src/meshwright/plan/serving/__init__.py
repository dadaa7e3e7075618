"""Plans of a service: replicas of an engine on parts of a cluster, priced and ranked. `plan` has plans of training."""
