"""What it saved and what it cost.

Costs predict seconds and joules of tokens; the ledger writes down what each hit saved,
what each retained byte-second cost and why tokens missed. Decides nothing.
"""
