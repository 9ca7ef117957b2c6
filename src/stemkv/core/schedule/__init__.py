"""What the next step computes, and for whom.

Requests wait in an order, become chunks of a plan, and what a driver hands back becomes
events: schedule, commit, events.
"""
