"""The life of a request on a decode worker with a radix cache.

Upstream: none is known.
"""
