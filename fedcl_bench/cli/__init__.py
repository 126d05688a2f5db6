"""The command line: arguments in, text and progress bars out. Each command's file holds its options and its help."""
