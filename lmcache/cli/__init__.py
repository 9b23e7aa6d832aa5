"""The command line: one command per file, loaded when it is asked for.

`main.py` has the table of commands and turns every error into one line and an exit code. A file `some_name.py` defines
the click command `some_name`; it imports what it needs inside the function, so that `lmcache --help` costs nothing.
"""
