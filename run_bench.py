#!/usr/bin/env python
"""Run fedcl_bench from a checkout: python run_bench.py --method f3crec --backbone fedmf"""
import sys

if not (3, 10) <= sys.version_info[:2] <= (3, 12):
    sys.exit("fedcl_bench needs Python 3.10, 3.11 or 3.12 (RecBole needs numpy 1.x, which later ones lack); "
             "this is Python %d.%d." % sys.version_info[:2])

from fedcl_bench.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
