#!/usr/bin/env bash
# Show the checkout as the import package `rheostat`: .ci/package.sh links|copies FOLDER writes FOLDER/rheostat.
# Links serve mypy, and Python that has not installed the checkout: PYTHONPATH=build/view:. python -m pytest
# Copies (hard links) serve import-linter, which does not follow symbolic links.
set -euo pipefail
kind=$1 package=$2/rheostat root=$(cd "$(dirname "$0")/.." && pwd)
rm -rf "$package"
mkdir -p "$package"
if [ "$kind" = links ]; then
    ln -s "$root"/{flows,tasks,models,placement,infra} "$root"/flows/root-package/*.py "$package"
else
    cp -rl "$root"/{flows,tasks,models,placement,infra} "$root"/flows/root-package/*.py "$package"
fi
