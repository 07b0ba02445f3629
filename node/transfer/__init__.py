"""Models from node to node: which pieces a node fetches of whom, where it keeps them, and what it gives to others.

`swarm_model` is what the agent asks: where this node's copy of the swarm's model is, and whether it may route it;
`catalogue` says which models the nodes have. `shared` makes files of what is looked up and fetches what is wanted of
them: `schedule` decides purely which pieces to ask of whom, `fetcher` asks, `service` is the source's side. `store` is
the bounded folder of fetched models, `stored` one of them in use, `bitmap` which of its pieces are there. A piece is
verified by its hash before it is written (`node.models.manifest`), and counts once it is on the disk.

It imports `node.models`, `node.peers` and the leaves; the agent and the commands import it.
"""
