"""Builds the compiled kernels beside their sources, where there is a C compiler; setup.cfg says everything else.

On x86-64 there is a library for each of two generations of processors, elsewhere one for all.
"""

import hashlib
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(path.as_posix() for path in Path("fedcl_bench/kernels").glob("kernels*.[ch]"))
# No contraction of products and sums: results do not depend on the processor.
FLAGS = ["-O2", "-g0", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
X86_64 = {"v3": ["-march=x86-64-v3"], "v4": ["-march=x86-64-v4"]}
BUILDS = X86_64 if platform.machine().lower() in ("x86_64", "amd64") else {"generic": []}


class Build(build_ext):
    """Libraries that are no Python modules: neither their names nor their functions depend on Python."""

    def get_ext_filename(self, fullname):
        return f"{fullname.replace('.', '/')}.so"

    def get_export_symbols(self, ext):
        return []


def kernels(name: str, flags: list) -> Extension:
    """The library of one build. It knows the digest of its sources, which is compared when it is loaded."""
    digest = hashlib.blake2b(b"".join(Path(source).read_bytes() for source in SOURCES), digest_size=12).hexdigest()
    return Extension(f"fedcl_bench.kernels.kernels_{name}", SOURCES[:1], depends=SOURCES[1:], libraries=["m"],
                     define_macros=[("SOURCES", f'"{digest}"')], extra_compile_args=FLAGS + flags, optional=True)


setup(ext_modules=[kernels(*build) for build in BUILDS.items()], cmdclass={"build_ext": Build})
