"""Pictures and reports of benchmarks and profiles."""
