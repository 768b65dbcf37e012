"""Futures of collectives that have begun, and who waits for them.

The reducer of DistributedDataParallel waits at the end of the backward pass for the futures of what it has started itself
and for those that a communication hook gives it. Whoever else takes a future may wait at any time or never: whether such
a collective has ended by then is chance, and what a recording holds must not be."""
import functools

import torch
import torch.distributed as dist

_promised = set()  # ids of Works whose future was taken
_hooked = []       # a reducer has a communication hook
_original = []     # Work.get_future, as it was before ours


def is_complete(work):
    """Gloo fulfils the future, which is what the reducer waits for, before it calls the Work complete."""
    if work.is_completed():
        return True
    try:
        return _original[0](work).done()
    except RuntimeError:  # a backend without futures
        return False


def for_reducer(key):
    return bool(_hooked) and key in _promised


def forget(key):
    _promised.discard(key)


def keep(keys):
    _promised.intersection_update(keys)


def _promising(original, pending):
    @functools.wraps(original)
    def get_future(self):
        if id(self) in pending:
            _promised.add(id(self))
        return original(self)

    return get_future


def _hooking(original):
    @functools.wraps(original)
    def register_comm_hook(self, *args, **kwargs):
        _hooked.append(True)
        return original(self, *args, **kwargs)

    return register_comm_hook


def install(pending):
    """pending: {id of a Work: ...} of the collectives that have begun."""
    _original.append(dist.Work.get_future)
    dist.Work.get_future = _promising(dist.Work.get_future, pending)
    reducer = torch.nn.parallel.DistributedDataParallel
    reducer.register_comm_hook = _hooking(reducer.register_comm_hook)
