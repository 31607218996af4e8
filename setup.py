"""Adds compiled CPU kernels to a wheel. `make wheel` names the folder that has them in PERSONAE_KERNELS.

Without it the wheel has the sources alone, and the first start compiles them.
"""

import os
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = os.environ.get("PERSONAE_KERNELS")


class BuildWithKernels(build_py):
    """Copies the libraries to where `personae.kernels.cpu.prebuilt` looks for them."""

    def run(self) -> None:
        """Build, then copy."""
        super().run()
        if KERNELS and not self.editable_mode:
            to = Path(self.build_lib, "personae", "kernels", "cpu", "prebuilt")
            to.mkdir(parents=True, exist_ok=True)
            for library in sorted(Path(KERNELS).glob("*.so")):
                shutil.copyfile(library, to / library.name)


class WithKernels(Distribution):
    """What has libraries is installed where such packages are."""

    def has_ext_modules(self) -> bool:
        """Whether it has libraries."""
        return bool(KERNELS)


class PlatformWheel(bdist_wheel):
    """A wheel with libraries is for one platform, but for any Python: ctypes loads them."""

    def get_tag(self) -> tuple[str, str, str]:
        """See bdist_wheel."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if KERNELS else (python, abi, platform)


setup(distclass=WithKernels, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
