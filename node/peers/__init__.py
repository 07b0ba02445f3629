"""This node among the others: its identity, who else is there, and requests between agents.

`identity` is who this node is across restarts. `peering` runs `gossip` and `gossip.discovery` for it, and `membership`
gives what gossip knows in this program's terms: peers with records that can be read. `http` sends and takes requests
between agents, with a proof of the swarm's key. `document` is ``GET /peers``: how the others were found and are
reached.

It imports `node.settings`, `gossip` and the leaves; `node.transfer`, the API, the agent and the commands use it.
"""
