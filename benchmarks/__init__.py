"""Benchmarks: published tables recomputed, and how fast it is (`python -m benchmarks --help`)."""
