"""Check whether an optional package that a reward needs is installed."""

import importlib.util

from rheostat.infra.errors import BadInput


def require_package(module: str, package: str, where: str) -> None:
    """Raise BadInput, with the installation command, if an optional package is not installed.

    `module` is the name for imports, `package` the name for installation, and `where` the setting that needs the
    package.
    """
    if importlib.util.find_spec(module) is None:
        raise BadInput(
            f"{where} needs the package {package}, which is not installed. Run: pip install 'rheostat[texts]'"
        )
