"""The front door: queries of OpenAI's and Anthropic's APIs, from a client to llama-server and back.

`front_door` has the handlers, and the way of a request through the rest: `request_body` reads it within limits and
looks into it, `client_watch` notices a client that leaves, `turns` lets as many in as llama-server has slots, `swarm`
is what the agent is asked (who answers now?), `upstream` posts to whoever that is. `reply` passes the answer on as it
comes, by whole events (`event_stream`), and explains an error by what experts reported (`errors` has each API's forms).
`client_hold` has llama-server notice a client that left; `cors` lets pages of allowed origins read the answers.

Bodies pass unchanged, and nothing of them is logged. It imports `node.peers` (requests between nodes carry a proof),
of `node.router` what a failure is, and the leaves; the agent gives it what it asks, as the `Swarm` of `swarm`.
"""
