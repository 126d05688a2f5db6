"""One module per command: ``add(commands)`` declares its options, ``run(args)`` does it and returns the exit status."""

NAMES = ("run", "grid", "tune", "tables", "compare", "figures", "sensitivity", "report", "audit",
         "pack", "list", "check", "new-plugin", "data", "doctor")
