"""The audit of exactness: is reused KV what a fresh prefill would give?"""
