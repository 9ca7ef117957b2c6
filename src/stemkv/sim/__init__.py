"""Real or made-up traffic through the core, on a virtual clock."""
