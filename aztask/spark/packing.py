"""Zips of Python code for Spark's ``--py-files``: aztask, what it needs, and your modules.

Rules
1. Spark puts ``.zip``, ``.egg`` and ``.jar`` files on the path of its Python workers. It copies
   wheels to them too, but never imports from those [measured with Spark 4.3], so they are repacked.
2. Python cannot import compiled modules from a zip. A distribution with compiled parts is packed
   only if it runs without them (`OPTIONAL_PARTS`); any other must be installed on the cluster.
3. The same input makes the same bytes.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Final, TypeAlias
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

from pyspark.sql import SparkSession

import aztask
from aztask.errors import ConfigurationError
from aztask.spark.kind import add_code, code_folder
from aztask.support.display import printable
from aztask.version import __version__

OWN: Final = "aztask"
INSTALLED: Final = frozenset({"pyspark", "py4j", "pyarrow", "pandas", "numpy"})
"""Distributions that a cluster already has: Spark's own, and what Arrow data needs."""
OPTIONAL_PARTS: Final = frozenset(
    {"charset-normalizer", "frozenlist", "markupsafe", "msgpack", "multidict", "propcache", "yarl"}
)
"""Distributions that also run without their compiled parts, only slower."""
COMPILED: Final = (".so", ".pyd", ".dylib", ".dll")
_USELESS: Final = (*COMPILED, ".pyc", ".pyi")
_CLUSTER: Final = "blob|crypto|delta|identity|keyvault|otel|schedules|spark|tables|tls|websockets"
"""The extras that an application may use on a cluster; pages, servers and tools stay here."""
_THERE: Final = re.compile(rf"""extra\s*==\s*["']({_CLUSTER})["']""")
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*")

Files: TypeAlias = dict[str, Path | bytes]
"""The content of a zip: name in the zip to the file's path or its bytes."""


@dataclass(frozen=True)
class PackedArchive:
    """A zip that was written.

    path, bytes: its place and its size. parts: its content, with versions. to_install: what aztask
    needs besides, to be installed on the machines of the cluster.
    """

    path: str
    bytes: int
    parts: tuple[str, ...]
    to_install: tuple[str, ...]


def pack(target: str | os.PathLike[str], sources: Sequence[str] = ()) -> PackedArchive:
    """Write a zip of aztask, its needs, and `sources`, for ``--py-files`` and ``addPyFile``.

    target: the zip, which is replaced atomically. sources: modules that can be imported from here,
    ``.py`` files, folders of packages, or wheels. Their own dependencies are not packed. Raises
    ConfigurationError.
    """
    path = Path(target)
    if path.suffix != ".zip":
        raise ConfigurationError(
            f"{printable(str(path))} does not end with .zip, and Spark takes no other file for code"
        )
    files: Files = {}
    parts: list[str] = []
    for source in sources:
        files |= _source(source)
        parts.append(source)
    own, names, to_install = _dependencies()
    files = {**own, **files}
    write_zip(path, files)
    return PackedArchive(str(path), path.stat().st_size, (*parts, *names), to_install)


def write_zip(target: Path, files: Files) -> None:
    """Write the zip completely or not at all. Raises ConfigurationError."""
    folders = {f"{folder}/" for name in files for folder in PurePosixPath(name).parents}
    try:
        handle, scratch = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as stream, ZipFile(stream, "w") as archive:
                # Without entries for folders, Python 3.12 and older find no namespace packages in
                # a zip, and the SDKs are all in one: azure.
                for name in sorted(folders - {"./"}):
                    archive.writestr(_entry(name, 0o40755), b"")
                for name in sorted(files):
                    content = files[name]
                    data = content if isinstance(content, bytes) else content.read_bytes()
                    archive.writestr(_entry(name, 0o100644), data, ZIP_DEFLATED)
            Path(scratch).chmod(0o644)
            Path(scratch).replace(target)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigurationError(
            f"{printable(str(target))} cannot be written: {error.strerror}"
        ) from None


def _entry(name: str, mode: int) -> ZipInfo:
    """An entry without a date, so that the same files make the same zip."""
    entry = ZipInfo(name)
    entry.external_attr = mode << 16
    return entry


def wheel_files(path: Path) -> Files:
    """The files that a wheel installs. Raises ConfigurationError if a zip cannot hold them."""
    files: Files = {}
    try:
        with ZipFile(path) as wheel:
            for info in wheel.infolist():
                name = _installed_name(info.filename)
                if name is not None and not info.is_dir():
                    files[name] = wheel.read(info)
    except (BadZipFile, OSError) as error:
        raise ConfigurationError(f"{printable(str(path))} is not a wheel: {error}") from None
    return _without_compiled(files, str(path))


def _installed_name(name: str) -> str | None:
    """The path of a wheel's file in site-packages; None if it goes elsewhere (PEP 427, .data)."""
    parts = name.split("/")
    if not parts[0].endswith(".data"):
        return name
    return "/".join(parts[2:]) if parts[1] in ("purelib", "platlib") else None


def _source(source: str) -> Files:
    """The files of one source; see `pack`."""
    path = Path(source)
    if source.endswith(".whl"):
        return wheel_files(path)
    if path.is_file():
        if path.suffix != ".py":
            raise ConfigurationError(
                f"{printable(source)} cannot be packed; give a module, a .py file, a package's "
                "folder or a wheel"
            )
        return {path.name: path}
    if path.is_dir() and (path / "__init__.py").is_file():
        return _without_compiled(_folder_files(path.absolute()), source)
    return _module_files(source)


def _module_files(name: str) -> Files:
    """The files of a module or package that can be imported from the working directory."""
    top = name.partition(".")[0]
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    spec = find_spec(top) if top.isidentifier() else None
    if spec is None:
        raise ConfigurationError(
            f"there is no file and no module {printable(name)} here; give a module that can be "
            "imported, a .py file, a package's folder or a wheel"
        )
    files: Files = {}
    for folder in spec.submodule_search_locations or ():
        files |= _folder_files(Path(folder))
    if spec.submodule_search_locations is None and spec.origin is not None:
        files = {Path(spec.origin).name: Path(spec.origin)}
    if not any(Path(str(path)).is_file() for path in files.values()):
        raise ConfigurationError(f"module {printable(top)} has no files here: pack its wheel")
    return _without_compiled(files, name)


def _folder_files(folder: Path) -> Files:
    """The files of a package; their names begin with its own folder."""
    return {
        f"{folder.name}/{path.relative_to(folder).as_posix()}": path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def _without_compiled(files: Files, source: str) -> Files:
    """The files. Raises ConfigurationError if one of them is compiled."""
    compiled = sorted(name for name in files if name.endswith(COMPILED))
    if compiled:
        raise ConfigurationError(
            f"{printable(source)} holds {printable(compiled[0])}, which is compiled, and Python "
            "cannot import that from a zip: install it on the machines of the cluster"
        )
    return files


def _dependencies() -> tuple[Files, tuple[str, ...], tuple[str, ...]]:
    """aztask and its dependencies as installed here: (files, names, what must be installed)."""
    files = _folder_files(Path(aztask.__file__).parent)
    try:
        waiting = list(_requirements(distribution(OWN), extras=True))
    except PackageNotFoundError:
        waiting = []
    if not files or not waiting:
        raise ConfigurationError(
            "aztask is not installed here, so its dependencies are unknown: install it with pip"
        )
    names, to_install = [f"{OWN} {__version__}"], []
    seen = {OWN, *INSTALLED}
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # of an extra that is not installed, or for another system
        its = _distribution_files(found)
        shown = f"{name} {found.version}"
        if its is None:
            to_install.append(shown)
            continue
        files = {**its, **files}
        names.append(shown)
        waiting += _requirements(found, extras=False)
    return files, tuple(names), tuple(sorted(to_install))


def _requirements(found: Distribution, *, extras: bool) -> Iterator[str]:
    """The names of a distribution's requirements.

    extras: those of its extras too, except those that an executor never uses.
    """
    for text in found.requires or ():
        optional = "extra" in text.partition(";")[2]
        if not optional or (extras and _THERE.search(text)):
            match = _NAME.match(text)
            if match is not None:
                yield re.sub(r"[-_.]+", "-", match[0]).lower()


def _distribution_files(found: Distribution) -> Files | None:
    """The files of a distribution for a zip; None if it must be installed instead."""
    name = re.sub(r"[-_.]+", "-", found.name).lower()
    listed = [PurePosixPath(path) for path in found.files or ()]
    inside = [path for path in listed if ".." not in path.parts and "__pycache__" not in path.parts]
    if not any(path.suffix == ".py" for path in inside):
        return None  # its installer did not list its modules
    if name not in OPTIONAL_PARTS and any(path.suffix in COMPILED for path in inside):
        return None
    return {
        str(path): Path(str(found.locate_file(str(path))))
        for path in inside
        if path.suffix not in _USELESS and _is_packed(path)
    }


def _is_packed(path: PurePosixPath) -> bool:
    """Whether to pack a file: of ``.dist-info`` only the version and the licence."""
    return ".dist-info" not in path.parts[0] or (
        path.name == "METADATA" or "licen" in str(path).lower()
    )


# -- sends code to the executors of a running session, wheels too --------------------------
#
# Spark copies wheels to its executors but never imports from them; see `aztask.spark.packing`.


IMPORTED: Final = (".py", ".zip", ".egg", ".jar")
WHEEL: Final = ".whl"
REPACKED: Final = "aztask-repacked"


def add_py_files(spark: SparkSession, paths: Iterable[str]) -> None:
    """Send each file to the executors; a wheel is repacked as a zip, which workers can import.

    Raises ConfigurationError.
    """
    for path in paths:
        with code_folder(spark) as folder:
            add_code(spark, _importable(path, folder))


def _importable(path: str, folder: Path) -> str:
    """The file from which workers can import, made in the folder if `path` is a wheel."""
    shown = printable(path)
    if "://" in path:
        if path.endswith(WHEEL):
            raise ConfigurationError(f"{shown} is a wheel on another machine: copy it here first")
        return path
    if not Path(path).is_file():
        raise ConfigurationError(f"{shown} is not a file; give a .py file, a zip or a wheel")
    if path.endswith(IMPORTED):
        return path
    if not path.endswith(WHEEL):
        raise ConfigurationError(
            f"{shown} is neither a .py file nor a zip nor a wheel: Spark would not import from it"
        )
    files = wheel_files(Path(path))
    (folder / REPACKED).mkdir(exist_ok=True)
    target = folder / REPACKED / f"{Path(path).stem}.zip"
    write_zip(target, files)
    return str(target)
