"""The KV cache in a PegaFlow server too, which other engines on the machine share.

tree.py         the caches: what they hold is saved, and what the server has beyond that is loaded
saves.py        which nodes are saved; prefetches.py: what requests wait for; fenced.py: pages that outlive their tree
room.py         what of the pool saves and loads must leave to requests
pages.py        by which names the server knows pages
session.py      what is handed over to the server: calls.py, done by saver.py, asker.py and loader.py
connection.py   the server, lost and found; server.py: where it is; memory.py: the pool as it sees it
scheduler.py    what all of this adds to a scheduler; checks.py: what is looked at before it starts

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""
