"""For workers that fork what they start, where the engine has each process import everything anew: of a worker's start,
that is 14 of 24 seconds of a core. Without a GPU only: CUDA does not survive a fork."""

import multiprocessing

_set = multiprocessing.set_start_method
multiprocessing.set_start_method = lambda method, force=False: _set("fork", force)
