"""``python -m node.expert_server``: the expert server as a process."""

from node.expert_server.server import main

main()
