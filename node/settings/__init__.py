"""The settings of a node: `table` has every one of them with its default and its meaning, `load` finds their values.

`kinds` says what types of values there are, `checks` what is wrong with one, `toml_text` on which line of a file a key
stands. `load` puts flags, variables, file and defaults together, in this order, into one frozen `Config`, or says
everything that is wrong with them at once. Files, environment variables, flags and their documentation all come from
the table. It imports the leaves only.
"""
