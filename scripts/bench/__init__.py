"""The cases of scripts/bench.py: one file per subject, and three benchmarks with options of their own.

data, measure, peers    what is measured on, how, and beside which libraries
write, read, online, cold, compressed, scale    the cases of `bench.py --case`
priority, shards, ray_recorders    `bench.py priority`, `bench.py shards` and `bench.py ray`
"""
