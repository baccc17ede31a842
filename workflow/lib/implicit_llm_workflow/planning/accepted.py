"""Results that somebody kept although their code changed: `accepted.json` beside the manifest, which stays as it is.

    {"format": 1, "accepted": [{"recorded": "<fingerprint of the manifest>", "wanted": "<the one wanted instead>",
     "recorded_code": "<sha256>", "wanted_code": "<sha256>", "changed": ["module (function)"] or null,
     "when": "2026-11-21T22:00:00+00:00", "why": "..."}]}

An acceptance holds for its pair of fingerprints alone: another change of code, config or input ends it, and so does the
loss of the manifest. While it holds, the job's identity is the recorded one, so that what was made from the result, and
Snakemake, see no change.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_contracts.runs.errors import ConfigError, UserError
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import Manifest, ManifestError

ACCEPTED = "accepted.json"
FORMAT = 1


class AcceptedUnreadable(UserError):
    """The file of accepted exceptions is not one."""


@dataclass(frozen=True)
class Acceptance:
    """One exception. `changed`: the code that changed, None where it was not recorded."""

    recorded: str
    wanted: str
    recorded_code: str
    wanted_code: str
    changed: tuple[str, ...] | None
    when: str
    why: str


def read_acceptances(run_dir: Path) -> list[Acceptance]:
    """All that were ever given and not revoked, oldest first. Raises: AcceptedUnreadable."""
    path = run_dir / ACCEPTED
    try:
        values = json.loads(path.read_bytes())
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r}")
        return [fill(Acceptance, entry, "accepted") for entry in values["accepted"]]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise AcceptedUnreadable(
            f"{path}: is not a list of accepted exceptions ({error}); delete the file to revoke them"
        ) from error


def write_acceptances(run_dir: Path, acceptances: Iterable[Acceptance]) -> None:
    """Replace the file; without acceptances there is none."""
    entries = [asdict(acceptance) for acceptance in acceptances]
    if entries:
        text = json.dumps({"format": FORMAT, "accepted": entries}, indent=1, ensure_ascii=False)
        write_atomic(run_dir / ACCEPTED, f"{text}\n")
    else:
        (run_dir / ACCEPTED).unlink(missing_ok=True)


def find_acceptance(run_dir: Path, wanted: Identity) -> Acceptance | None:
    """The one that holds: for the wanted fingerprint and that of the manifest, which differ by the code alone."""
    for acceptance in read_acceptances(run_dir):
        if acceptance.wanted == wanted.fingerprint and with_code_of(acceptance, wanted) is not None:
            try:
                recorded = Manifest.of_run(run_dir)
            except ManifestError:
                return None
            if recorded is not None and recorded.fingerprint == acceptance.recorded:
                return acceptance
    return None


def with_code_of(acceptance: Acceptance, wanted: Identity) -> Identity | None:
    """The accepted identity; None when it is not the wanted one with other code."""
    identity = replace(wanted, code=acceptance.recorded_code)
    return identity if identity.fingerprint == acceptance.recorded else None
