"""The audit of isolation: can one tenant learn what another one asks?"""
