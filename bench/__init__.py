"""Benchmarks: `python -m bench.index`, one module per part of StemKV.

Run from the root of a checkout. They import what they measure and nothing imports
them; they are no part of the wheel.
"""
