"""KV of a decode worker in host memory, below its tree: what has left the pool need not be computed and sent again.

memory.py    the bytes, and copies; tree.py: which tokens they are of
saves.py     what is copied to host memory; tier.py: what requests get back from there
storage.py   what is below it

Upstream: none is known that keeps a promise to prefill; sgl-project/sglang#30322 tells of a later release's that fails.
"""
