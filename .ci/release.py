"""`make release`: everything that a release needs but its tag and its upload; prints the commands for these."""

import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parents[1]
FACTS = {"License-Expression": "Apache-2.0", "Requires-Python": ">=3.11", "License-File": "LICENSE"}


def git(*arguments: str) -> str:
    """Returns what git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def check_sources(version: str) -> None:
    """Raises AssertionError if the files disagree on the version, the tree is not clean, or the tag is there."""
    said = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1:3]
    assert said[0].strip() == "Unreleased", f"CHANGELOG.md: move what is under Unreleased to {version}"
    assert said[1].startswith(f"{version} - 20"), f"CHANGELOG.md: the newest version is not {version} with its date"
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8"), "CITATION.cff"
    assert not git("status", "--porcelain"), "commit or stash first: the tree is not clean"
    assert not git("tag", "--list", f"v{version}"), f"the tag v{version} is there"


def check_files(version: str, wheel: Path, sdist: Path) -> None:
    """Raises AssertionError for a wheel or a source distribution with wrong facts, too few files or too many."""
    stem, tracked = f"meshwright-{version}", set(git("ls-files").splitlines())
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        facts = message_from_bytes(archive.read(f"{stem}.dist-info/METADATA"))
    ours = {name.removeprefix("src/") for name in tracked if name.startswith("src/") and not name.endswith(".md")}
    assert ours <= packed, f"the wheel lacks {sorted(ours - packed)}"
    others = {name for name in packed - ours if not name.startswith(f"{stem}.dist-info/") and not name.endswith(".md")}
    assert not others, f"the wheel has {sorted(others)}"
    assert {key: facts[key] for key in (*FACTS, "Version")} == {**FACTS, "Version": version}, facts.items()
    assert facts.get_payload().startswith("# meshwright"), "the README is not the description"
    with tarfile.open(sdist) as archive:
        missing = tracked - {name.removeprefix(f"{stem}/") for name in archive.getnames()}
    assert not missing, f"the source distribution lacks {sorted(missing)}"


def release() -> None:
    """Checks everything, and prints the commands. Raises AssertionError for what stands in the way."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    check_sources(version)
    subprocess.run(["make", "--silent", "wheel"], cwd=ROOT, check=True)
    wheel, sdist = (ROOT / "dist" / f"meshwright-{version}{end}" for end in ("-py3-none-any.whl", ".tar.gz"))
    check_files(version, wheel, sdist)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([Path(folder, "bin", "python"), "-m", "pip", "install", "--quiet", wheel], check=True)
        command = [Path(folder, "bin", "meshwright"), "--version"]
        said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout.strip()
    assert said == f"meshwright, version {version}", f"meshwright.__version__: {said}"
    print(f"{wheel.name} and {sdist.name} are whole. To release them:")
    print(f"  git tag --annotate v{version} --message 'meshwright {version}' && git push origin v{version}")
    print(f"  uv publish dist/meshwright-{version}*")


if __name__ == "__main__":
    try:
        release()
    except AssertionError as error:
        sys.exit(f"no release: {error}")
