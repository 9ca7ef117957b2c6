"""The audit of identity: is KV reached only by requests that it is right for?"""
