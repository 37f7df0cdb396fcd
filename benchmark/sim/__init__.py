"""A discrete-event simulation of a PD deployment around the real decode worker; see ``simulate.py``.

``times``: how long things take. ``workload``, ``scale`` and ``kinds``: what is asked. ``events``: the clock.
``prefill``: prefill workers and links, which are models. ``decode``: the decode worker, whose queues, tree, pool and
allocator are the real ones. ``deployment``: all of them together, with routers and clients. ``figures``: what came of
it.
"""
