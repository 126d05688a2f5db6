"""One module per command: ``add(commands)`` declares its options, ``run(args)`` does it and returns the exit status."""

NAMES = ("run", "grid", "tune", "tables", "reproduction", "pack", "list", "data", "doctor")
