"""python -m fedcl_bench"""
import sys

from .cli.main import main

sys.exit(main())
