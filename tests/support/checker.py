"""An independent check of a run's directory: `python tests/support/checker.py STORE/RUN`.

It imports nothing of the product and reads the layout of a store with its own code. Each line that it prints is a
violation. It checks waves and continued completions by their digests only.
"""

import hashlib
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from blake3 import blake3

Record = dict[str, object]
STATES = {"state", "critic_state"}
"""Names under which manifests list the optimizer states of a policy and of its critic."""
LEFT_OUT = {"lock", "report", "quarantine", "export"}
"""Files that prove nothing: the lock, pictures, quarantined shards, exports."""


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def hexdigest(data: bytes) -> str:
    return blake3(data).hexdigest()


def problems_of(run: Path) -> list[str]:
    """Return all violations in a run's directory."""
    records, problems = read_records(run)
    manifests = {key.removeprefix("manifests/"): r for key, r in records.items() if key.startswith("manifests/")}
    for check in (
        check_identity(records, manifests),
        check_manifests(manifests),
        check_parts(run, manifests),
        check_chain(records),
        check_epochs(records, manifests),
        check_iterations(run, manifests),
        check_states(records, manifests),
    ):
        try:
            problems += check
        except (KeyError, TypeError, IndexError, OSError, ValueError, pa.ArrowInvalid) as error:
            problems.append(f"unreadable: {type(error).__name__}: {error}")
    return problems


def read_records(run: Path) -> tuple[dict[str, Record], list[str]]:
    """Read sealed records by their path without suffix.

    Check that each is canonical and that its seal is the digest of the rest.
    """
    records: dict[str, Record] = {}
    problems: list[str] = []
    files = [run / "run.json"]
    files += [path for part in ("manifests", "chain", "journal", "lease") for path in sorted((run / part).rglob("*"))]
    for path in files:
        if path.is_dir():
            continue
        key = path.relative_to(run).as_posix().removesuffix(".json")
        try:
            data = path.read_bytes()
            record = json.loads(data)
            seal = record.pop("seal")
        except (OSError, ValueError, KeyError, AttributeError) as error:
            problems.append(f"{key}: no sealed record: {error}")
            continue
        if hexdigest(canonical(record)) != seal or canonical({**record, "seal": seal}) != data:
            problems.append(f"{key}: its seal is broken")
        records[key] = record
    return records, problems


def check_identity(records: dict[str, Record], manifests: dict[str, Record]) -> Iterator[str]:
    """Check that the run's record states the digest of its configuration, and that every manifest carries it."""
    record = records["run"]
    stated = hashlib.blake2b(json.dumps(record["config"], sort_keys=True).encode(), digest_size=8).hexdigest()
    if record["fingerprint"] != stated:
        yield "run: its fingerprint is not that of its configuration"
    yield from (
        f"{key}: of another run" for key, manifest in manifests.items() if manifest.get("run", stated) != stated
    )


def check_manifests(manifests: dict[str, Record]) -> Iterator[str]:
    """Check that each manifest has the digest of its content, the name of its file, and existing parents."""
    digests = {str(manifest["digest"]) for manifest in manifests.values()}
    for key, manifest in manifests.items():
        result = {name: value for name, value in manifest.items() if name not in ("digest", "provenance")}
        if hexdigest(canonical(result)) != manifest["digest"]:
            yield f"{key}: its digest is not that of its result"
        if manifest["key"] != key:
            yield f"{key}: says that it is {manifest['key']}"
        yield from (f"{key}: its parent {parent} is missing" for parent in manifest["parents"] if parent not in digests)


def check_parts(run: Path, manifests: dict[str, Record]) -> Iterator[str]:
    """Check that every file that a manifest names has its digest, and that no unnamed file is incomplete."""
    retired = {key.removeprefix("retention/") for key in manifests if key.startswith("retention/")}
    newest = max(updates_of(manifests), default="")
    for key, manifest in manifests.items():
        gone = key.startswith(given_up(manifests))
        for shard in manifest["shards"]:
            if gone:
                yield from [f"{key}: {shard['key']} was given up and is there"] * (run / shard["key"]).exists()
                continue
            data = (run / shard["key"]).read_bytes()
            if hexdigest(data) != shard["digest"] or len(data) != shard["bytes"]:
                yield f"{key}: {shard['key']} is damaged"
            elif pa.ipc.open_file(data).read_all().num_rows != shard["rows"]:
                yield f"{key}: {shard['key']} has other rows"
        for name, bundle in manifest["bundles"].items():
            is_last = key == newest or f"{key.removesuffix('/update')}/return" in manifests
            if is_last and name in STATES and not (run / bundle["key"] / "bundle.json").exists():
                continue  # not stored yet, or to be recomputed
            if bundle["digest"][:16] not in retired:
                yield from (
                    f"{key}: {name}: {problem}" for problem in check_bundle(run / bundle["key"], bundle["digest"])
                )
    for path in sorted(run.rglob(".tmp-*")):
        yield f"{path.relative_to(run)}: a temporary file was left"
    for path in sorted(run.iterdir()):
        if path.is_file() and path.name not in {"run.json", "metrics.jsonl", *LEFT_OUT}:
            yield f"{path.name}: a file that nothing names"


def check_bundle(folder: Path, digest: str) -> Iterator[str]:
    contents = (folder / "bundle.json").read_bytes()
    if hexdigest(contents) != digest:
        yield f"{folder.name}/bundle.json is damaged"
        return
    named = json.loads(contents)["files"]
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {"bundle.json"}
    yield from (f"{folder.name}/{name} is missing or too many" for name in sorted(found ^ named.keys()))
    for name in sorted(found & named.keys()):
        if hexdigest((folder / name).read_bytes()) != named[name]["digest"]:
            yield f"{folder.name}/{name} is damaged"


def check_chain(records: dict[str, Record]) -> Iterator[str]:
    """Check that each record of a chain names the previous one by digest, and that all files that it names exist."""
    chains: dict[str, dict[str, Record]] = defaultdict(dict)
    for key, record in records.items():
        if key.startswith("chain/"):
            chains[key.rpartition("/")[0]][key] = record
    for links in chains.values():
        yield from check_links(links, records)


def check_links(links: dict[str, Record], records: dict[str, Record]) -> Iterator[str]:
    last, previous = "", ""
    for place, (key, link) in enumerate(sorted(links.items()), start=1):
        if int(re.search(r"/(\d+)-[^/]*$", key)[1]) != place or link["follows"] != last or link["previous"] != previous:
            yield f"{key}: does not follow {last or 'nothing'}"
        last = f"{key}.json"
        previous = hexdigest(canonical({name: value for name, value in link.items() if name != "schema_version"}))
        for name, digest in link["manifests"].items():
            if records.get(f"manifests/{name}", {}).get("digest") != digest:
                yield f"{key}: {name} is gone or another"
        for name, digest in link["journal"].items():
            entry = {k: v for k, v in records.get(f"journal/{name}", {}).items() if k != "schema_version"}
            if hexdigest(canonical(entry)) != digest:
                yield f"{key}: journal/{name} is gone or another"


def check_epochs(records: dict[str, Record], manifests: dict[str, Record]) -> Iterator[str]:
    """Check that leases are numbered without a gap, and that nothing was committed under a lease that was not taken."""
    epochs = sorted(int(key.removeprefix("lease/")) for key in records if key.startswith("lease/"))
    if epochs != list(range(1, len(epochs) + 1)):
        yield f"lease: expected epochs from 1 without a gap, found {epochs}"
    for key, manifest in manifests.items():
        if manifest["provenance"]["epoch"] not in epochs:
            yield f"{key}: committed under epoch {manifest['provenance']['epoch']}, which nobody took"


def check_iterations(run: Path, manifests: dict[str, Record]) -> Iterator[str]:
    """Check that iterations are sealed in order and each sample is trained once.

    Each sample must come from a rollout of its iteration by the required policy.
    """
    sealed = sorted(key.removesuffix("/seal") for key in manifests if re.fullmatch(r"it-\d+/seal", key))
    if sealed != [f"it-{number:04d}" for number in range(1, len(sealed) + 1)]:
        yield f"sealed iterations have a gap: {sealed}"
    whole = not any("/wave-" in key for key in manifests)
    config = json.loads((run / "run.json").read_text())["config"]
    lag = config["rollout"].get("staleness", 0)
    every = config["update"].get("kl", {}).get("reset_every", len(sealed) + 1)
    for number, part in enumerate(sealed, start=1):
        before, behaviour = (
            manifests["policy/initial" if version <= 0 else policy_key(manifests, version)]
            for version in (number - 1, number - 1 - lag)
        )
        credit, update = manifests[f"{part}/credit"], manifests[f"{part}/update"]
        expected = [before["digest"], credit["digest"]]
        if 0 < (reset := number - 1 - (number - 1) % every) < number - 1:
            expected.append(manifests[policy_key(manifests, reset)]["digest"])
        if update["parents"] != expected:
            yield f"{part}/update: not made from the policy before it, the iteration's credit and the reset reference"
        if not whole or part.startswith(tuple(below.rstrip("/") for below in given_up(manifests))):
            continue
        generated: Counter[tuple[int, int]] = Counter()
        for key in sorted(key for key in manifests if key.startswith(f"{part}/rollout/")):
            if behaviour["digest"] not in manifests[key]["parents"]:
                yield f"{key}: generated by another policy than the iteration's"
            for name, prompts in prompts_of(run, manifests[key]):
                if name in generated:
                    yield f"{key}: sample {name} was generated twice"
                generated[name] = prompts
        trained = Counter(names_of(run, credit))
        if any(count != generated[name] for name, count in trained.items()):
            yield f"{part}/credit: a sample is trained twice, or was never generated"


def check_states(records: dict[str, Record], manifests: dict[str, Record]) -> Iterator[str]:
    """Check that each update names its optimizer state when it is due.

    An update without a step has the state of the version before.
    """
    every, last, before = records["run"]["config"]["update"].get("state_every", 1), 0, {}
    versions = {0: (last, before)}
    for number, key in enumerate(updates_of(manifests), start=1):
        named = {name: bundle["digest"] for name, bundle in manifests[key]["bundles"].items() if name in STATES}
        if not manifests[key]["metrics"]["steps"]:
            if named != before:
                yield f"{key}: took no step and names another state than the version before"
        elif bool(named) != (number - last >= every):
            yield f"{key}: {'names' if named else 'has no'} state; the one before is of version {last}"
        last, before = versions[number] = number if named else last, named
        if (returned := manifests.get(f"it-{number:04d}/return")) is not None:
            last, before = versions[number] = versions[returned["detail"]["to"]]
            versions[number] = last, before = (number if before else last), before


def given_up(manifests: dict[str, Record]) -> tuple[str, ...]:
    """Return the prefixes of manifests whose shards were deleted."""
    return tuple(below for manifest in manifests.values() for below in manifest["detail"].get("shards_below", ()))


def policy_key(manifests: dict[str, Record], version: int) -> str:
    """Return the key of a version: the policy that the run reverted to, if it reverted, or else the trained policy."""
    returned = f"it-{version:04d}/return"
    return returned if returned in manifests else f"it-{version:04d}/update"


def updates_of(manifests: dict[str, Record]) -> list[str]:
    """Return the keys of the trained policies, in order."""
    return sorted(key for key in manifests if re.fullmatch(r"it-\d+/update", key))


def names_of(run: Path, manifest: Record) -> list[tuple[int, int]]:
    """Return the prompt row and sample of every row of a manifest's first shard."""
    table = pa.ipc.open_file((run / manifest["shards"][0]["key"]).read_bytes()).read_all()
    return list(zip(table["prompt_row"].to_pylist(), table["sample"].to_pylist(), strict=True))


def prompts_of(run: Path, manifest: Record) -> list[tuple[tuple[int, int], int]]:
    """Return prompt row and sample of each rollout of a manifest's first shard, and the number of prompts before."""
    table = pa.ipc.open_file((run / manifest["shards"][0]["key"]).read_bytes()).read_all()
    authors = ([part["policy_version"] for part in parts] for parts in table["segments"].to_pylist())
    return list(zip(names_of(run, manifest), (1 + versions.count(-2) for versions in authors), strict=True))


if __name__ == "__main__":
    found = problems_of(Path(sys.argv[1]))
    print("\n".join(found) or "everything holds")  # noqa: T201
    sys.exit(bool(found))
