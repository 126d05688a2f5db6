"""Tables as files: publishers' and users' own made RecBole's atomic files, and those read."""
