"""The program swarm-node. Its parts, in the order in which one understands them:

    records, slices      what nodes say of themselves, and the arithmetic of what they hold
    node.settings        every setting, and where its value comes from
    node.models          a model file: its slices, its pieces, and the id that follows from its bytes
    node.expert_server   the process that holds slices and answers expert calls; the order to load comes from its parent
    node.router          the engine: llama-server with the Swarm backend, its routing table and the layer programs
    node.peers           who else is there: identity, gossip, and requests with a proof of the swarm's key
    node.transfer        pieces of models, fetched from other nodes and given to them
    node.api             the front door: the query endpoint, from a client to llama-server and back
    node.agent           one node: sees the swarm, elects, plans, follows the plan, and keeps all of the above running
    node.commands        the command ``swarm-node``; nothing imports it

The files beside the packages are what several of these need; they import no package. Who may import whom, and four
walks through the code, are in docs/architecture.md.
"""
