"""Model files: what is in them, what stands for their bytes, and some that are made here.

`gguf` reads and writes headers, `index` makes of them trunk and expert slices, `pieces` what is hashed and fetched as
one. `manifest` holds the digests of the pieces, from which a model's id follows; `hashing` computes it of local files,
once. `layout` is how a copy is split into files. `local` finds this node's files, and `known` tells which of them is
the model that the swarm serves. `demo` cuts a small dense model into experts; `synthetic` writes a large model's shape
with random weights, made by `random_blocks`.

No weight leaves this package for computing: expert servers and llama.cpp read the files themselves. It imports only
the leaves and `kernels.cpu_quota`.
"""
