"""Benchmarks: `python -m benchmarks.run` measures, `python -m benchmarks.report` publishes."""
