"""The contracts of covary.testing: that docs/testing.md works, and that they find what is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "testing.md"

# Each is wrong in one thing: a variance that is too small, a gain that is not the slope, the rule
# of another function, a score that looks at other samples.
WRONG = {
    "variance": """
from covary.covariance import Full

class Wrong(Full):
    @property
    def variance(self):
        return 0.9 * super().variance

class TestVariance(covary.testing.CovarianceContract):
    cases = {"wrong": lambda: Wrong(torch.eye(4, dtype=torch.float64)[None])}
""",
    "gain": """
from dataclasses import replace
tanh = covary.activations.get("tanh")
wrong = replace(tanh, moments=lambda mu, var: tanh.moments(mu, var)._replace(gain=1 + 0 * mu))

class TestGain(covary.testing.ActivationContract):
    cases = {"wrong": wrong}
""",
    "rule": """
@covary.rules.elementwise(torch.special.expit)
def wrong():
    return covary.activations.get("tanh")

class TestRule(covary.testing.RuleContract):
    cases = {"wrong": (torch.special.expit, torch.randn(3, 4, dtype=torch.float64))}
""",
    "score": """
class TestScore(covary.testing.ScoreContract):
    cases = {"wrong": lambda out: out.variance.sum(-1) - out.variance.sum(-1).mean()}
""",
    "no cases": """
class TestNoCases(covary.testing.ScoreContract):
    pass
""",
}


def run(code: str, folder: Path) -> str:
    """What pytest says about a file with this code, in a process of its own."""
    (folder / "test_own.py").write_text(f"import torch\nimport covary, covary.testing\n{code}")
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *options, "test_own.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def test_the_example_of_the_page_passes(tmp_path):
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    said = run("\n".join(code), tmp_path)
    assert re.search(r"^\d\d passed", said, re.MULTILINE), said


def test_what_is_wrong_is_found(tmp_path):
    said = run("\n".join(WRONG.values()), tmp_path)
    assert "TestNoCases has no cases" in said
    for name in ("Variance", "Gain", "Rule", "Score"):
        assert re.search(rf"^FAILED test_own.py::Test{name}::", said, re.MULTILINE), said
