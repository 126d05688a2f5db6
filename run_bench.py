#!/usr/bin/env python
"""Run fedcl_bench from a checkout: python run_bench.py --method f3crec --backbone fedmf"""
import sys

if not (3, 10) <= sys.version_info[:2] <= (3, 14):
    sys.exit("fedcl_bench needs Python 3.10 to 3.14; this is Python %d.%d." % sys.version_info[:2])

from fedcl_bench.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
