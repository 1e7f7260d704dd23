"""Files and folders of the app that other users of the machine can change or read, for doctor.

The rules are those of `aztask.support.private`. Doctor also warns of what is used all the same:
what others can read, and directories in which they can replace a file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from aztask.app import App
from aztask.errors import AztaskError, ConfigurationError
from aztask.queues.engine.filesystem import PARTS, group_id
from aztask.stores.payloads.opening import FolderPayloads
from aztask.support.finding import Finding, fine, problem, warning
from aztask.support.private import exposure, has_users, in_use

READ_BY_GROUP: Final = stat.S_IRGRP
READ_BY_OTHERS: Final = stat.S_IROTH


class KeptFile(NamedTuple):
    """A file or folder of the app.

    * `what`: names it, such as "the queue file".
    * `group`: the id of the group that it is shared with.
    * `secret`: it holds arguments or results, so others must not read it.
    """

    what: str
    path: Path
    group: int | None = None
    secret: bool = True


def kept_by(app: App) -> Iterator[KeptFile]:
    """All files and folders that the app has on this machine, those that do not exist included."""
    for what, address in app.local_files:
        group = None
        with suppress(ConfigurationError):  # the group does not exist: opening the file says so
            group = group_id(address.group) if address.group else None
        for part in PARTS:
            yield KeptFile(what, Path(os.path.realpath(address.path) + part), group)
    with suppress(AztaskError):  # the checks of payloads report it
        store = app.payloads.store if app.payloads is not None else None
        if isinstance(store, FolderPayloads):
            yield KeptFile("the folder of payloads", store.folder, store.group)
    if app.settings.events is not None:
        yield KeptFile("the event directory", Path(app.settings.events).absolute(), secret=False)


def exposed_findings(app: App) -> Iterator[Finding]:
    """A finding for each place that others can change or read, or one that says that none is.

    Windows has access lists instead of owners and modes; Python makes up a mode there.
    """
    fit = []
    for kept in kept_by(app):
        if not has_users():
            text = "files inherit the permissions of their folder, which are not looked at here"
            yield fine("files", "owner", text)
            return
        try:
            status = kept.path.stat()
            findings = list(_of(kept, status))
        except FileNotFoundError:
            continue
        except OSError as error:
            text = f"{kept.what} {kept.path} cannot be looked at: {error.strerror}"
            yield warning("files", "owner", text, "run this as its owner")
            continue
        yield from findings
        if not findings:
            mode = stat.S_IMODE(status.st_mode)
            fit.append(f"{kept.path} (user {status.st_uid}, mode {mode:04o})")
    if fit:
        yield fine("files", "owner", f"no other user can change {', '.join(fit)}")


def _of(kept: KeptFile, status: os.stat_result) -> Iterator[Finding]:
    found = exposure(kept.path, kept.group)
    if found is not None:
        text = f"{kept.what} {kept.path} {found.why}"
        if found.foreign or not in_use(kept.path):
            yield problem("files", "owner", text, found.advice, ConfigurationError(text))
        else:
            yield warning("files", "owner", f"{text}; the next release refuses it", found.advice)
        return
    shared = kept.group is not None and status.st_gid == kept.group
    readers = READ_BY_OTHERS | (0 if shared else READ_BY_GROUP)
    if kept.secret and status.st_mode & readers:
        yield warning(
            "files",
            "mode",
            f"{kept.what} {kept.path} can be read by other users "
            f"(mode {stat.S_IMODE(status.st_mode):04o}), arguments and results included",
            f"run: chmod {'o' if shared else 'go'}-rwx {kept.path}",
        )
    folder = kept.path.parent.stat()
    replaced = folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX
    if replaced:
        yield warning(
            "files",
            "folder",
            f"every user can replace {kept.what} {kept.path}: its directory has the mode "
            f"{stat.S_IMODE(folder.st_mode):04o}",
            "choose a directory that belongs to this user",
        )
