"""The build backend: setuptools, then a wheel of the same bytes each time, with its SBOM.

Rules
1. Two builds of one revision give the same bytes, with the same Python and setuptools: entries are
   sorted, and their times and modes say nothing of the machine. ``SOURCE_DATE_EPOCH`` sets the time
   (reproducible-builds.org/specs/source-date-epoch); else it is the first that a zip can have.
2. What an earlier build has left in the tree plays no part: each one has its own build directory.
3. The links of the README, which are relative in the repository, are absolute in the metadata, as
   a package index shows it. Their address is that of "Source" in setup.cfg's project_urls.
4. The SBOM (CycloneDX 1.6, JSON) lists what the wheel contains of others, with hashes, and what it
   requires, as the metadata of the wheel says it. It lies where PEP 770 says: ``.dist-info/sboms``.

Every other hook is setuptools' own.
"""

from __future__ import annotations

import base64
import email
import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # the hooks that stay as they are

FIRST: Final = 315_532_800
"""1980-01-01, UTC: the first time that a zip can hold."""

VENDORED: Final = "vendored.toml"
"""Names such a file what others have written in its folder, with version, licence and address. See
`aztask/dashboard/static`."""

REQUIREMENT: Final = re.compile(r"([\w.-]+)(?:\[[^]]*\])?\s*\(?([^;)]*)\)?\s*(?:;\s*(.*))?")
LINK: Final = re.compile(r"(?m)(\]\(|^\[[^\]\n]+\]: )(?!https?://|#)([^)\s]+)")
"""A relative link of the README: in its place, or where the links are defined."""
EXTRA: Final = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")


def build_wheel(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel (PEP 517), add the SBOM, and write it anew by rule 1."""
    with tempfile.TemporaryDirectory() as folder:
        extra = Path(folder, "setup.cfg")
        extra.write_text(f"[build]\nbuild_base = {folder}/build\n", encoding="utf-8")
        before = os.environ.get("DIST_EXTRA_CONFIG")
        os.environ["DIST_EXTRA_CONFIG"] = str(extra)
        try:
            name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
        finally:
            os.environ.pop("DIST_EXTRA_CONFIG")
            if before is not None:
                os.environ["DIST_EXTRA_CONFIG"] = before
    rewrite(Path(wheel_directory, name))
    return str(name)


def build_sdist(sdist_directory: str, config_settings: Mapping[str, Any] | None = None) -> str:
    """Build the source distribution (PEP 517), with the links of its metadata by rule 3."""
    name = str(build_meta.build_sdist(sdist_directory, config_settings))
    path = Path(sdist_directory, name)
    data = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=data, mode="w") as new:
        for entry in old:
            found = old.extractfile(entry)
            content = found.read() if found is not None else b""
            if PurePosixPath(entry.name).name == "PKG-INFO":
                content = with_absolute_links(content)
                entry.size = len(content)
            new.addfile(entry, io.BytesIO(content))
    path.write_bytes(gzip.compress(data.getvalue(), mtime=0))
    return name


def with_absolute_links(metadata: bytes) -> bytes:
    """The metadata with absolute links in the README, which is its body (rule 3)."""
    head, blank, readme = metadata.decode().partition("\n\n")
    urls = email.message_from_string(head).get_all("Project-URL") or []
    found = dict(each.split(", ", 1) for each in urls)
    if "Source" not in found:
        raise ValueError("setup.cfg has no Source in project_urls")
    readme = LINK.sub(rf"\g<1>{found['Source']}/blob/main/\g<2>", readme)
    return f"{head}{blank}{readme}".encode()


def rewrite(wheel: Path) -> None:
    """Add the SBOM to a wheel, and write all of it with sorted entries and the same times."""
    with ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    info = str(PurePosixPath(record).parent)
    files[f"{info}/sboms/aztask.cdx.json"] = sbom(files, info)
    if "Project-URL" in files[f"{info}/METADATA"].decode():
        files[f"{info}/METADATA"] = with_absolute_links(files[f"{info}/METADATA"])
    del files[record]
    lines = [_recorded(name, data) for name, data in sorted(files.items())]
    files[record] = "".join([*lines, f"{record},,\n"]).encode()
    at = time.gmtime(max(FIRST, int(os.environ.get("SOURCE_DATE_EPOCH", FIRST))))[:6]
    with ZipFile(wheel, "w", ZIP_DEFLATED) as archive:
        # The metadata comes last, as the format recommends: it is read without the rest.
        for name in sorted(files, key=lambda each: (".dist-info/" in each, each)):
            entry = ZipInfo(name, at)
            entry.compress_type = ZIP_DEFLATED
            entry.create_system = 3  # Unix, whatever this system is
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, files[name])


def _recorded(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


# -- the SBOM --------------------------------------------------------------------------------


def sbom(files: Mapping[str, bytes], info: str) -> bytes:
    """The bill of materials of a wheel with these files (cyclonedx.org/docs/1.6/json)."""
    metadata = email.message_from_bytes(files[f"{info}/METADATA"])
    name, version = metadata["Name"], metadata["Version"]
    own = f"pkg:pypi/{name}@{version}"
    required = list(requirements(metadata.get_all("Requires-Dist") or []))
    contained = list(vendored(files))
    about: dict[str, Any] = {
        "component": {
            "type": "library",
            "bom-ref": own,
            "name": name,
            "version": version,
            "purl": own,
            "licenses": [{"license": {"id": metadata["License-Expression"] or "MIT"}}],
        }
    }
    if (epoch := os.environ.get("SOURCE_DATE_EPOCH")) is not None:
        about["timestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(epoch)))
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": about,
        "components": [*contained, *required],
        "dependencies": [
            {"ref": own, "dependsOn": sorted(each["bom-ref"] for each in [*contained, *required])}
        ],
    }
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def requirements(lines: list[str]) -> Iterator[dict[str, Any]]:
    """A component for each package that is required, with the versions that are allowed."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in lines:
        if (match := REQUIREMENT.fullmatch(line)) is None:
            raise ValueError(f"{line!r} is no requirement")
        extra = EXTRA.search(match[3] or "")
        wanted = found.setdefault(match[1].lower(), [])
        wanted.append((extra[1] if extra else "", f"{match[1]}{match[2].strip()}"))
    for name, wanted in sorted(found.items()):
        always = any(not extra for extra, _ in wanted)
        yield {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}",
            "name": name,
            "purl": f"pkg:pypi/{name}",
            "scope": "required" if always else "optional",
            "properties": [
                {"name": f"aztask:requires{f':{extra}' if extra else ''}", "value": text}
                for extra, text in sorted(set(wanted))
            ],
        }


def vendored(files: Mapping[str, bytes]) -> Iterator[dict[str, Any]]:
    """A component for each file of others that is in the wheel, with its hash."""
    for place in sorted(name for name in files if PurePosixPath(name).name == VENDORED):
        for name, about in sorted(tomllib.loads(files[place].decode()).items()):
            path = str(PurePosixPath(place).parent / name)
            yield {
                "type": "library",
                "bom-ref": about["purl"],
                "name": about["purl"].rpartition("/")[2].partition("@")[0],
                "version": about["version"],
                "purl": about["purl"],
                "scope": "required",
                "licenses": [{"license": {"id": about["spdx"]}}],
                "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(files[path]).hexdigest()}],
                "evidence": {"occurrences": [{"location": path}]},
            }
