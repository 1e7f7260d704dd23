"""What ``aztask doctor --bundle`` packs for a bug report: a zip of JSON files, without secrets.

Rules
1. Only what is named here is packed: versions, findings, settings, plans of queues, names of tasks,
   and which variables are set. No message, argument, result, event or log.
2. The value of a variable is packed only if a setting that is no secret reads it. Of all others
   there is the name.
3. The last step replaces every secret that this process knows, wherever it is: those of settings
   and addresses, and the values of variables that look like one.
"""

from __future__ import annotations

import json
import os
import re
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from aztask.app import App
from aztask.config import Settings
from aztask.errors import AztaskError
from aztask.support.display import MASK, Secret, mask
from aztask.support.finding import Finding
from aztask.support.private import BINARY, FILE_MODE
from aztask.support.settings import table_of
from aztask.support.versions import versions

READS: Final = re.compile(r"AZTASK_|AZURE_|OTEL_|MSI_|IDENTITY_|HTTPS?_PROXY|NO_PROXY|PYTHON")
"""Variables whose names are packed: those that aztask and Azure's libraries read."""

SECRET: Final = re.compile(
    r"KEY|SECRET|PASSWORD|TOKEN|SIGNATURE|CONNECTION|CREDENTIAL|PROXY|AZTASK_\w*ACCOUNT"
)
SHORTEST: Final = 4
"""A shorter value is not replaced everywhere: it may be a part of any word."""


def bundle(
    app: App, findings: Sequence[Finding], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """{name: text} of the files."""
    found = {
        "versions.json": versions(),
        "findings.json": [
            {**asdict(each), "level": each.level.value, "error": type(each.error).__name__}
            if each.error is not None
            else {**asdict(each), "level": each.level.value}
            for each in findings
        ],
        "settings.json": _settings(app),
        "queues.json": {name: _plan(app, name) for name in app.queue_names()},
        "tasks.json": {name: task.queue for name, task in sorted(app.tasks.items())},
        "variables.json": _variables(environment),
    }
    hidden = sorted(_secrets(app, environment), key=len, reverse=True)
    return {name: _masked(value, hidden) for name, value in found.items()}


def write_bundle(path: Path, files: Mapping[str, str]) -> None:
    """Write a new zip that only this user may read. Raises FileExistsError."""
    number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | BINARY, FILE_MODE)
    at = time.gmtime()[:6]
    with os.fdopen(number, "wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(f"aztask-bundle/{name}", at)
            archive.writestr(entry, text, zipfile.ZIP_DEFLATED)


def _settings(app: App) -> dict[str, Any]:
    own = {each.name: getattr(app.settings, each.name) for each in fields(Settings)}
    return {"app": app.name, "broker": app.address, **own}


def _plan(app: App, name: str) -> Any:
    try:
        plan = app.queue_plan(name)
    except AztaskError as error:
        return str(error)
    return {
        "lease": plan.lease,
        "max_lease": plan.max_lease,
        "max_deliveries": plan.max_deliveries,
        "window": plan.window,
        "own": plan.own,
    }


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    plain = {row.variable for row in table_of(Settings).values() if "Secret" not in row.takes}
    return {
        name: value if name in plain and not SECRET.search(name) else "set"
        for name, value in sorted(environment.items())
        if READS.match(name)
    }


def _secrets(app: App, environment: Mapping[str, str]) -> Iterator[str]:
    for each in fields(Settings):
        value = getattr(app.settings, each.name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Secret):
                yield one.reveal()
    for name, value in environment.items():
        if SECRET.search(name.upper()) and len(value) >= SHORTEST:
            yield value


def _masked(value: Any, hidden: Sequence[str]) -> str:
    """As JSON. Rule 3 is applied to each text, before JSON escapes what is in it."""

    def clean(each: Any) -> Any:
        if isinstance(each, str):
            for secret in hidden:
                if secret:
                    each = each.replace(secret, MASK)
            return mask(each)
        if isinstance(each, Mapping):
            return {clean(str(name)): clean(inner) for name, inner in each.items()}
        if isinstance(each, list | tuple | set | frozenset):
            return [clean(inner) for inner in each]
        return each if isinstance(each, int | float) or each is None else clean(str(each))

    return json.dumps(clean(value), indent=2, ensure_ascii=False) + "\n"
