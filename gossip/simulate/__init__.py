"""A whole swarm in one process and in simulated time, from a seed: ``python -m gossip.simulate``.

`simulation` runs real `gossip.swim` nodes, and stands in for their clocks and disks; `network` is what lies between
them: links that lose, delay and duplicate, and cuts. `scenarios` are the stories, from a crash to everything at once,
and say what must have happened in the end; `run` is one swarm in one of them, with the figures that come of it.
`invariants` must hold after every step of every node, whatever happens. Each failure names the command that shows it
again. Tests and scripts/soak use it; nothing of the program does.
"""
