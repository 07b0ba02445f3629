"""One node: what it sees of its swarm, what it does next, and its parts as the one who routes and who holds experts.

Read it in this order: `own_record` and `view` are what is seen, without I/O; `reconcile` is the list of steps from a
view to actions, with `election` and `placement` below it; `supervisor` carries the actions out; `router_role` and
`expert_role` are the parts a node may have. `agent` puts all of it together. `status`, `metrics_page` and `readiness`
tell of a view; `http_server` has the routes. Everything below `node` is used from here, and only `node.commands` uses
this.
"""
