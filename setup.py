"""What pyproject.toml cannot say: a wheel brings examples/ along, for `diloco examples`. All else is there."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExamples(build_py):
    """Copies examples/ into the package, where they are in the source tree and it is not installed in place."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "diloco" / "packaged_examples"
        for path in sorted(Path(__file__).resolve().parent.glob("examples/*.*")):
            self.mkpath(str(target))
            self.copy_file(str(path), str(target / path.name))


setup(cmdclass={"build_py": BuildWithExamples})
