"""The KV cache is also kept in a PegaFlow server, which other engines on the machine share.

tree.py         the caches, which are also the tier: save new nodes, load prefixes beyond the tree
saves.py        which nodes are saved; prefetches.py: look-ups and loads that requests wait for
room.py         capacity of the pool that saves and loads may use
session.py      work for the server and the threads that do it
connection.py   the connection, and its recovery; memory.py: layout of the pool
checks.py       checks before the start; support.py: refused combinations

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""
