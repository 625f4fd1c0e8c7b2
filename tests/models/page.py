"""Results of `make test-models`: stored by family, printed, and written to docs/models.md by `make models-page`."""

import json
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rheostat.infra.environments.find import find_environment
from tests.support.jobs import ROOT
from tests.support.model_families import FAMILIES

RESULTS = Path("build/models.json")
"""Results by family, of the last run of each family in this checkout."""
PAGE = ROOT / "docs/models.md"
START, END = "<!-- results of make test-models -->\n", "<!-- end of the results -->\n"
LIST_ARCHITECTURES = (
    "import json; from vllm import ModelRegistry as R; print(json.dumps(sorted(R.get_supported_archs())))"
)


def read_results() -> dict[str, str]:
    """Return the stored results by family."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def write_results(results: Mapping[str, str]) -> None:
    """Store results by family."""
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")


def format_results(results: Mapping[str, str]) -> str:
    """Return results as lines of text, in the order of families.toml."""
    return "\n".join(f"{family:20} {results[family]}" for family in FAMILIES if family in results)


def format_table(results: Mapping[str, str], *, in_vllm: Collection[str]) -> str:
    """Return results and engines as a Markdown table. `in_vllm` are the classes that vLLM knows.

    A family without a stored result has the result "not run".
    """
    rows = ["| `model_type` | result | `transformers` | `vllm` |", "|---|---|---|---|"]
    for family in FAMILIES:
        result = results.get(family, "not run")
        engine = "yes" if result.startswith("trains") else "not run" if result == "not run" else "no"
        classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
        known = {classes} if isinstance(classes, str) else set(classes)
        rows.append(f"| `{family}` | {result} | {engine} | {'listed' if known & set(in_vllm) else 'no'} |")
    return "\n".join(rows) + "\n"


def list_vllm_architectures() -> tuple[str, list[str]]:
    """Return the version of the installed vLLM and the classes of models that it knows."""
    environment = find_environment("vllm", None)
    listed = subprocess.run(
        [str(environment.python), "-c", LIST_ARCHITECTURES], capture_output=True, text=True, check=True
    )
    return environment.versions["vllm"], json.loads(listed.stdout.splitlines()[-1])


def write_page() -> None:
    """Replace the table of the page. Exits with a message if there are no results, or if a family failed."""
    results = read_results()
    if failed := [family for family in FAMILIES if results.get(family) == "FAILED"]:
        sys.exit(f"{RESULTS}: {', '.join(failed)} failed. Fix the cause, and run `make test-models` again.")
    if not results:
        sys.exit(f"{RESULTS} has no results. Run `make test-models` first.")
    version, in_vllm = list_vllm_architectures()
    versions = (
        f"The results were computed with transformers {transformers.__version__}. "
        f"The column `vllm` lists the model classes of vLLM {version}.\n"
    )
    table = f"{START}{versions}\n{format_table(results, in_vllm=in_vllm)}{END}"
    PAGE.write_text(re.sub(f"{START}.*{END}", lambda _: table, PAGE.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    write_page()
