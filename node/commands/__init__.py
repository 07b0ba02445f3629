"""The command ``swarm-node`` and its screens.

`main` reads the arguments and calls what a command does, imported only then. `run` runs a node. `ask`, `status`,
`peers` and `trace` (`trace_figures` counts, `trace_screen` draws) ask one, which `find_node` finds. `doctor` checks
this machine (`doctor_machine`, `doctor_network`; `doctor_check` is one finding), `report` puts all of it into an
archive (`report_parts`; `report_redaction` says what may stand in it). `model` shows, lists and makes models
(`model_show`, `model_list`). `verify` compares what nodes compute (`verify_matrix`, `verify_decisions`,
`verify_screen`). `demo` is a swarm of `local_swarm` on this machine, with `chat` over it.

A command that asks a node knows it by its HTTP documents only. It may import all packages but `node.api`; nothing
imports it.
"""
