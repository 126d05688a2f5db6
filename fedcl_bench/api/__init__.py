"""The suite from Python: runs and records in, results as pandas frames, tests, figures and recommendations out.

``fedcl_bench.run``, ``fedcl_bench.load`` and ``fedcl_bench.Results`` lead here; docs/records.md shows each of them.
"""
