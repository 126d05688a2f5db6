def add(commands): commands.add_parser("reproduction")
def run(args): return 0
