"""What a router runs: llama-server with the Swarm backend, which computes a model's routed experts on other nodes.

`engine` is that llama-server. `llama_server` starts, awaits and ends one, with or without the backend; `control` is the
channel to the backend; `failure` is what goes wrong, apart from the rest so that the front door can explain it.
`table` says which node answers for which experts, `programs` what the experts of a layer compute, as llama.cpp builds
it. `engine_metrics` adds up what the engines of this node have done.

It imports `node.models`, the leaves and `kernels`; the agent and the commands use it, and `node.api` its `failure`.
"""
