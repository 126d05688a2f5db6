#!/usr/bin/env python
"""Run fedcl_bench from a checkout: python run_bench.py --method f3crec --backbone fedmf"""
import sys

if not (3, 10) <= sys.version_info[:2] <= (3, 12):
    sys.exit("fedcl_bench needs Python 3.10, 3.11 or 3.12 (RecBole needs numpy 1.x, which later ones lack); "
             "this is Python %d.%d." % sys.version_info[:2])

try:
    from fedcl_bench.cli import main
except ImportError as error:
    if error.name is None or error.name.split(".")[0] == "fedcl_bench":
        raise
    sys.exit("fedcl_bench: the package '%s' is missing; run: "
             "python -m pip install -c constraints.txt -e ." % error.name)

if __name__ == "__main__":
    sys.exit(main())
