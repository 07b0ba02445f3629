"""The process that holds expert slices and answers expert calls, and its parent's side of it.

`__main__` makes the parts. `server` takes calls over HTTP and hands WebSockets to `native_calls`, whose threads answer
what is right in every respect; all else is answered by `calls`, in the form of `wire`, by way of `compute_queue`.
`guard` says who may call. `orders` are the parent's: `held_slices` loads and drops what they name (`held_layers` is
what it knows of that), and a slice answers calls once `proof` has found what `admission` asks of it. `speed` measures
the device.

In the parent, `process` starts the server again and again, `process_run` is one such life, and `client` makes single
calls. It imports the leaves and `kernels` only, so that an expert-only build is a folder; the agent and the commands
use it.
"""
