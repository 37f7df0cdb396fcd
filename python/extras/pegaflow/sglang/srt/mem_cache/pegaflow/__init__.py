"""The KV cache in a PegaFlow server too, which other engines on the machine share.

tree.py         the caches: what they hold is saved, and what the server has beyond that is loaded; they are the tier
saves.py        which nodes are saved; prefetches.py: what requests wait for
room.py         what of the pool saves and loads must leave to requests
session.py      what is handed over to the server, and the threads that do it
connection.py   the server, lost and found; memory.py: the pool as it sees it
checks.py       what is looked at before it starts; support.py: what is refused

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""
