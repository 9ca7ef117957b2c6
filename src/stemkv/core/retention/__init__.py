"""What goes next when memory is short.

Tiers stand above any policy, quotas choose whose blocks go, the policy chooses which,
hints and a look at the queue inform it. Sees nodes, sizes and times, never tokens.
"""
