"""The settings of a node: `table` has every one of them with its default and its meaning, `load` finds their values.

`kinds` says what a value may be, `toml_text` on which line of a file a key stands. Files, environment variables, flags
and their documentation all come from the table. Nothing here knows any other part of the program.
"""
