"""Shared by the unit tests."""

import zmq

# The managers of the wire tests have threads that never end, as in the engine, and so their sockets stay open.
zmq.Context.instance().set(zmq.MAX_SOCKETS, 8192)
