"""One module per command: ``add(commands)`` declares its options, ``run(args)`` does it and returns the exit status."""

NAMES = ("run", "list", "data", "doctor")
