"""Tables and plots from results files: `python -m benchmarks.report` writes what is published."""
