"""Check what is in the wheel and the sdist of a folder: all of the package, its types, nothing else in the wheel.

python scripts/contents.py dist
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOP = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml")
FOLDERS = ("docs", "examples", "memmap_buffer", "scripts", "tests")


def package() -> set[str]:
    """The files of the package here."""
    found = (path.relative_to(ROOT) for path in (ROOT / "memmap_buffer").rglob("*") if path.is_file())
    return {path.as_posix() for path in found if "__pycache__" not in path.parts}


def wrong(dist: Path) -> list[str]:
    """What is missing or too much, a line each."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if not name.split("/")[0].endswith(".dist-info")}
        licences = [name for name in file.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    expected = package()
    return [
        *(f"{wheel.name} lacks {name}" for name in sorted(expected - names)),
        *(f"{wheel.name} has {name}" for name in sorted(names - expected)),
        *([] if licences else [f"{wheel.name} lacks the licence"]),
        *(f"{sdist.name} lacks {name}" for name in sorted({*expected, *TOP} - packed)),
        *(
            f"{sdist.name} has nothing in {name}"
            for name in FOLDERS
            if not any(p.startswith(f"{name}/") for p in packed)
        ),
        *(
            f"{sdist.name} has {n}"
            for n in sorted(packed)
            if n.split("/")[0] not in {*TOP, *FOLDERS, "PKG-INFO", ".gitignore"}
        ),
    ]


if __name__ == "__main__":
    found = wrong(Path(sys.argv[1]))
    print("\n".join(found) or "the wheel and the sdist hold what they should")
    sys.exit(bool(found))
