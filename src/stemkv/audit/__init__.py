"""Audits: they try to break what the project promises, and show the evidence.

Owns the attacks and their verdicts. Needs the extra `engine` where tensors are needed.
"""
