"""What is resident, under which identity, and for whom.

Tokens and the facts that change KV name a namespace; domains say who may see what is in
it; the tree finds the longest published prefix; blocks and leases say who holds it.
Knows nothing of policies, requests or books.
"""
