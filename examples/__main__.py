"""Run the scripts of the gallery, and write docs/gallery.md with what they print and draw.

python -m examples                    # all of them
python -m examples firing_rates       # this one; of the others the page stays as it is
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIGURES = "figures/gallery"
QUOTED = "score_any_network"  # also in docs/any-network.md
SCRIPTS = (
    "table_intervals",
    "refuse_when_unsure",
    "score_any_network",
    "convert_trained",
    "convert_from_a_module_on",
    "convert_and_fine_tune",
    "sources_of_error",
    "gap_in_the_data",
    "pendulum",
    "learn_the_variance",
    "attack_and_notice",
    "correlated_noise",
    "firing_rates",
    "spiking_decisions",
)
# What else is in examples/, and what for.
OTHERS = {
    "efficientnet_lite0": "a network with ImageNet weights, on [a page of its own](pretrained.md)",
    "efficientnet_lite0_network": "its layers and weights",
    "molecules": "energies of molecules, on [the same page](pretrained.md#energies-of-molecules)",
    "molecules_network": "its features and weights",
    "pendulum_network": "the pendulum and the network that learned it",
    "plain_sine": "the plain network of the sources of error",
    "plain_digits": "the plain CNN and the digits that several scripts use",
    "drawing": "options and pictures of the scripts above",
}
HEAD = """# Gallery

Short scripts, each for somebody. All of them run on data that come with scikit-learn or are made on
the spot, in at most a few minutes, from a clone of the repository:
`python -m examples.table_intervals`, and `--figure out.png` for the picture. They are run as tests.
This page is written by `python -m examples`: what stands here is what they printed and drew.
"""


def about(name: str) -> str:
    """The first sentence of a script: for whom it is, and what it shows."""
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]


def run(name: str, figure: Path, *options: str) -> str:
    """What a script prints; its picture goes to ``figure``."""
    command = [sys.executable, "-m", f"examples.{name}", "--figure", str(figure), *options]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if ran.returncode:
        raise RuntimeError(f"{shown(command)} failed:\n{ran.stderr}")
    return ran.stdout.strip()


def shown(command: list[str]) -> str:
    return " ".join(["python", *command[1:]])


def section(name: str, printed: str) -> str:
    """A script on the page: for whom, picture, output, code."""
    who, what = about(name).rstrip(".").split(": ", 1)
    return f"""
## {what[0].upper()}{what[1:]}

*{who}.* `examples/{name}.py`

![{what}]({FIGURES}/{name}.png)

```console
$ python -m examples.{name}
{printed}
```

??? example "The script"

    ```{{.python .script}}
    --8<-- "examples/{name}.py"
    ```
"""


def quote(text: str, printed: str) -> str:
    """A page with what the quoted script printed, between its marks."""
    found = re.compile(f"(<!-- output: {QUOTED} -->\n).*?(<!-- end -->)", re.DOTALL)
    return found.sub(lambda m: f"{m[1]}\n```\n{printed}\n```\n\n{m[2]}", text)


def others() -> str:
    rows = "\n".join(f"- `examples/{name}.py`: {what}." for name, what in OTHERS.items())
    return f"\n## Also in this folder\n\n{rows}\n- `examples/__main__.py`: what writes this page.\n"


def printed_before(name: str, page: str) -> str:
    """What the page says that a script printed."""
    before, after = section(name, "\0").split("\0")
    return page.split(before, 1)[1].split(after, 1)[0]


def main() -> None:
    docs = ROOT / "docs"
    parser = argparse.ArgumentParser(
        prog="python -m examples", description="Run scripts of the gallery and write its page."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCRIPTS)}")
    chosen = parser.parse_args().names or SCRIPTS
    if unknown := set(chosen) - set(SCRIPTS):
        sys.exit(f"no script {', '.join(unknown)} in the gallery; there are {', '.join(SCRIPTS)}")
    old = "" if chosen == SCRIPTS else (docs / "gallery.md").read_text(encoding="utf-8")
    page = HEAD
    for name in SCRIPTS:
        if name not in chosen:
            page += section(name, printed_before(name, old))
            continue
        print(name, flush=True)
        printed = run(name, docs / FIGURES / f"{name}.png")
        page += section(name, printed)
        if name == QUOTED:
            quoting = docs / "any-network.md"
            quoting.write_text(quote(quoting.read_text(encoding="utf-8"), printed), "utf-8")
    (docs / "gallery.md").write_text(page + others(), encoding="utf-8")


if __name__ == "__main__":
    main()
