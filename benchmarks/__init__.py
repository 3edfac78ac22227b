"""Benchmarks: workloads.py says what, _timing.py how; each bench_<what>.py prints a report for reports/."""
