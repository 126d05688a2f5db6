"""python -m fedcl_bench"""
import sys

from .cli import main

sys.exit(main())
