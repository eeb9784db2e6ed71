"""Examples, each a program that checks every byte it has moved.

Run one by ``python -m multirail.examples.NAME``:

- ``hello``: two fabrics of one process, a write of scattered pages, and an imm
- ``kv_cache_handover``: a prefill process hands a KV cache to a decode process, layer by layer (asyncio)
- ``weight_broadcast``: a trainer sends each version of its weights to N worker processes
- ``elastic_workers``: workers join and leave; one is killed, and the others go on
- ``gpu_tensors``: torch tensors from one GPU to another

Each prints one line, and exits with 0 if all bytes were right. They need numpy. ``gpu_tensors`` needs torch too, and so
does ``kv_cache_handover --torch``.
"""
