"""What `titan-relay` can do: a module for each command, with `main(arguments)` -> exit code
and `parser()`, its options.

`main` raises `ConfigError` for a mistake of the user's and imports what is heavy only once the
arguments and the configuration are right.
"""
