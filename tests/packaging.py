"""Build sdist and wheel, install the wheel where the repository is not, and use it there.

``make package`` runs it. Two environments are made in a temporary folder: one to build in, which
has the build backend alone, and one to use the wheel in. Everything in them comes by pip, so what
the wheel's metadata forget to ask for is missed here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.request
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
# A build that installs more than so many packages has pulled in what it does not need.
MOST_TO_BUILD_WITH = 8

# What runs in the new environment: with the core's dependencies alone, then with those of the
# command line.
CHECKS = """
import sys
from importlib import metadata
from pathlib import Path

import covary

about = metadata.metadata("covary")
package = Path(covary.__file__).parent
assert package.is_relative_to(sys.prefix), f"{package} is not in {sys.prefix}"
assert about["Version"] == covary.__version__ == metadata.version("covary")
assert about["License-Expression"] == "Apache-2.0"
assert (package / "py.typed").is_file()
files = {str(file) for file in metadata.files("covary")}
assert any(file.endswith(".dist-info/licenses/LICENSE") for file in files)
places = {file.split("/")[0] for file in files} - {".."}
assert places == {"covary", f"covary-{covary.__version__}.dist-info"}, places
(command,) = metadata.entry_points(group="console_scripts", name="covary")
assert command.value == "covary.cli:app"
here = f"{sys.version_info.major}.{sys.version_info.minor}"
said = [each for each in about.get_all("Classifier") if "Python :: 3." in each]
assert said == [f"Programming Language :: Python :: {here}"], f"{said}: this is Python {here}"
assert about["Requires-Python"] == f">={here}"
print(f"covary {covary.__version__} from {package}")
"""
SCRIPT = """
import torch, covary
torch.manual_seed(0)
net = covary.mlp([4, 16, 3], noise=0.2).eval()
out = net(torch.randn(8, 4))
assert out.covariance_matrix.shape == (8, 3, 3) and out.entropy().isfinite().all()
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
x = torch.randn(64, 4)
converted = covary.convert(model.eval(), noise=0.1)
covary.track(converted, x)
assert (converted(x).variance > 0).all()
print("ten lines: mean", tuple(out.mean.shape), "covariance", tuple(out.covariance_matrix.shape))
"""


def main() -> None:
    """All of it, in a temporary folder; the first thing that is not as it should be is an error."""
    with tempfile.TemporaryDirectory(prefix="covary-package-") as name:
        folder = Path(name).resolve()
        wheel = build(folder)
        python = environment(folder / "fresh")
        install(python, str(wheel))
        for script, code in (("checks.py", CHECKS), ("ten_lines.py", SCRIPT)):
            (folder / script).write_text(code, encoding="utf-8")
            run(python, "-I", script, cwd=folder)
        install(python, f"{wheel}[cli]")
        run(python, "-m", "pip", "check", cwd=folder)
        command = python.with_name("covary")
        run(command, "--version", cwd=folder)
        run(command, "demo", "--epochs", "2", "--out", "demo", cwd=folder)
        assert (folder / "demo" / "report.html").stat().st_size > 10_000
        install(python, f"{wheel}[serve]")
        first_answer(command, folder)
    print("The package is as it should be.")


def first_answer(command: Path, folder: Path) -> None:
    """Serve the demo's run, and ask it about a black picture."""
    asked = [str(command), "serve", "demo", "--port", "0"]
    print("$ " + " ".join(asked), flush=True)
    with subprocess.Popen(
        asked, cwd=folder, env=clean_environment(), stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            entries = (json.loads(line) for line in server.stdout)
            url = next((entry["url"] for entry in entries if entry["event"] == "started"), "")
            assert url, "the server did not start"
            question = urllib.request.Request(
                f"{url}predict",
                data=json.dumps([[0] * 8] * 8).encode(),
                headers={"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(question, timeout=60) as answer:
                (prediction,) = json.load(answer)["predictions"]
        finally:
            server.terminate()
            server.communicate(timeout=60)  # its last words, too
    assert prediction["flag"] == "ask someone", prediction


def build(folder: Path) -> Path:
    """Build the sdist from the repository and the wheel from the sdist; give the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    python, dist = environment(folder / "builder"), folder / "dist"
    before = packages(python)
    install(python, *project["build-system"]["requires"])
    added = packages(python) - before
    assert len(added) <= MOST_TO_BUILD_WITH, f"the build environment has {sorted(added)}"
    run(python, "-m", "hatchling", "build", "-t", "sdist", "-d", str(dist), cwd=ROOT)
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "source", filter="data")
    (unpacked,) = (folder / "source").iterdir()
    run(python, "-m", "hatchling", "build", "-t", "wheel", "-d", str(dist), cwd=unpacked)
    (wheel,) = dist.glob("*.whl")
    packed = {name for name in ZipFile(wheel).namelist() if name.startswith("covary/")}
    tracked = run(
        "git", "ls-files", "-co", "--exclude-standard", "covary", cwd=ROOT, quiet=True
    ).split()
    assert packed == set(tracked), f"wheel and repository differ in {sorted(packed ^ set(tracked))}"
    return wheel


def environment(folder: Path) -> Path:
    """Make a virtual environment with pip alone; give its python."""
    run(sys.executable, "-m", "venv", str(folder), cwd=folder.parent)
    return folder / "bin" / "python"


def install(python: Path, *what: str) -> None:
    """Install by pip, at the versions that the tests ran with."""
    # Byte code is written when something is imported; most of what is installed never is.
    options = ("--quiet", "--disable-pip-version-check", "--no-compile", *CONSTRAINTS)
    run(python, "-m", "pip", "install", *options, *what, cwd=python.parent)


def packages(python: Path) -> set[str]:
    """What is installed."""
    return set(run(python, "-m", "pip", "freeze", cwd=python.parent, quiet=True).splitlines())


def clean_environment() -> dict[str, str]:
    """That of this process, without what it has on Python's path."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(*command: str | Path, cwd: Path, quiet: bool = False) -> str:
    """Run a command; give what it printed."""
    started = time.monotonic()
    ran = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    shown = " ".join(str(word) for word in command)
    if ran.returncode:
        raise SystemExit(f"$ {shown}\n{ran.stdout}{ran.stderr}\nended with {ran.returncode}")
    if not quiet:
        print(f"$ {shown}  ({time.monotonic() - started:.0f} s)", flush=True)
    return ran.stdout


if __name__ == "__main__":
    main()
