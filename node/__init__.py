"""The swarm-node program: expert server, wire formats, routing tables, router engine, command line."""
