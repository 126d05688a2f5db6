"""One module per command: its docstring is its description, ``EXAMPLES`` stand below its options, ``add(parser)``
declares these, and ``run(args)`` does it and returns the exit status; None is 0."""

COMMANDS = {
    "run": "run a method on a backbone and a dataset (the default)",
    "grid": "run methods x backbones x datasets x seeds x settings in parallel",
    "tune": "choose settings on validation data, with an equal budget for every method",
    "tables": "rebuild a paper's tables, or make your own, from records",
    "compare": "test whether methods differ, from finished runs",
    "headroom": "say how much there is to gain, and what share of it methods gain",
    "figures": "draw figures for print, from finished runs",
    "sensitivity": "vary every setting that a paper and its code read differently, and draw what it moves",
    "report": "records as one HTML page to look at",
    "checklist": "answer a reproducibility checklist from records",
    "audit": "attack clients' uploads: what do they tell the server?",
    "leaks": "measure what of validation and test reaches training or ranking",
    "list": "show methods, backbones, metrics and datasets, or one in full",
    "check": "test whether a plugin is correct, federated and continual",
    "new-plugin": "write a method, backbone, metric or attack to start from, and its test",
    "client": "be a client of a federation on real machines, with data of your own",
    "export": "write a run as an app for a Flower deployment",
    "data": "show a dataset's blocks or sessions; convert, download or make datasets",
    "doctor": "check this installation and say what to fix",
    "submit": "make the folder of a submission to the leaderboard",
    "verify": "verify a submission: its records, one seed again, its plugins",
    "pack": "for maintainers: write compact records for publication",
}
