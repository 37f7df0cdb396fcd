"""For a decode worker whose transport breaks what it writes: one bit of the first delta page of every odd room."""

import ctypes
import importlib

import wrapt


def _patch(module):
    for backend, name in (("nixl", "NixlKVReceiver"), ("mooncake", "MooncakeKVReceiver")):
        _spoil(getattr(importlib.import_module(f"sglang.srt.disaggregation.{backend}.conn"), name))


def _spoil(receiver_class):
    send_metadata, landed = receiver_class.send_metadata, receiver_class.once_metadata_landed

    def remember(receiver, kv_indices, *args, **kwargs):
        receiver.to_spoil = kv_indices[:1] if receiver.bootstrap_room % 2 else []
        return send_metadata(receiver, kv_indices, *args, **kwargs)

    def spoil(receiver, state):
        # As late as it can be: the room in the metadata buffer says that all is there.
        if receiver.metadata_room and receiver.metadata_room() == receiver.bootstrap_room and len(receiver.to_spoil):
            args = receiver.kv_mgr.kv_args
            page, receiver.to_spoil = int(receiver.to_spoil[0]), []
            # A bit of the exponent of the first float32 of the page.
            spoilt = ctypes.c_uint8.from_address(args.kv_data_ptrs[0] + page * args.kv_item_lens[0] + 3)
            spoilt.value ^= 0x04
        return landed(receiver, state)

    receiver_class.send_metadata, receiver_class.once_metadata_landed = remember, spoil


# When all patch files are in place: the scheduler imports what they change.
wrapt.register_post_import_hook(_patch, "sglang.srt.managers.scheduler")
