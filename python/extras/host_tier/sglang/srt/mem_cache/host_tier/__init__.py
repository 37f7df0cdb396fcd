"""HiCache L2 on decode: KV evicted from the tree's pool stays in host memory and is not computed and sent again.

memory.py    host pools and copies; tree.py: the trees
saves.py     saves to host memory; tier.py: loads for requests
storage.py   the storage (L3) below it

Upstream: none is known that keeps a promise to prefill; sgl-project/sglang#30322 tells of a later release's that fails.
"""
