"""SWIM with Lifeguard: membership as a state machine, from events to actions, without I/O, clock or own randomness.

`core.Gossip` is the whole of it to everybody else: ``handle(now, event)`` returns actions, `events` has both kinds.
Inside, a packet goes this way: `beliefs` merges what it tells of members (`members`, `lifeguard`'s suspicions), and by
its kind `pings`, `probing` or `relays` take it. What a node does by itself: `probing` asks one member after the other
(`ring`) whether it lives, `seeking` looks for nodes at announced addresses (`candidates`) and for the dead that come
back, `pulls` fetches records, `syncing` compares whole views. `local` holds what all of them share: the node itself,
its members, `timers`, `broadcasts` (news to pass on) and the actions. `paths` says at which address a member is
reached, `settings` how long everything takes.

It imports the leaves of `gossip` and nothing else of it: `gossip.service` runs it on sockets, `gossip.simulate` in
simulated time.
"""
