"""What was measured of a converted network, and the table that shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from covary.passes import Call


class Measurements(nn.Module):
    """What was measured at the calls of a converted network, as buffers saved with its weights."""

    def known(self) -> dict[str, Tensor]:
        """Variances and covariances by the name of the call."""
        return self._of("measured/")

    def shares(self) -> dict[str, float]:
        """The part that each source had in the variance of the output, on average."""
        return {name: float(share) for name, share in self._of("share/").items()}

    @property
    def is_tracked(self) -> bool:
        """Whether ``covary.track`` has run, even if there was nothing to measure."""
        return any(name == "tracked" or name.startswith("measured/") for name in self._buffers)

    @property
    def propagates(self) -> bool:
        """Whether variances are estimated for each sample, or the same for all."""
        return "propagates" in self._buffers

    def set_propagates(self, wanted: bool) -> None:
        """Choose whether variances are estimated for each sample from now on."""
        if wanted:
            self._buffers["propagates"] = torch.tensor(True)
        else:
            self._buffers.pop("propagates", None)

    def replace(self, measured: Mapping[str, Tensor]) -> None:
        """Forget what was measured before."""
        for name in [name for name in self._buffers if name != "propagates"]:
            del self._buffers[name]
        for name, value in measured.items():
            self._set("measured/", name, value)
        self._buffers["tracked"] = torch.tensor(True)

    def blend(self, measured: Mapping[str, Tensor], momentum: float) -> None:
        """Move what is known towards what was measured now, by this fraction."""
        known = self.known()
        for name, value in measured.items():
            before = known.get(name)
            fits = before is not None and before.shape == value.shape
            self._set(
                "measured/",
                name,
                torch.lerp(before, value, momentum) if fits else value,  # type: ignore[arg-type]
            )

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Keep the part of each source."""
        for name, share in shares.items():
            self._set("share/", name, torch.tensor(share, dtype=torch.float32))

    def _of(self, prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix).replace("/", "."): value
            for name, value in self._buffers.items()
            if name.startswith(prefix) and value is not None
        }

    def _set(self, prefix: str, name: str, value: Tensor) -> None:
        self._buffers[prefix + name.replace(".", "/")] = value.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # What was measured belongs to the weights: all of it is replaced by what comes with them.
        weights = prefix.removesuffix("sites.") + "model."
        if not any(key.startswith((prefix, weights)) for key in state_dict):
            return  # of something else
        self._buffers.clear()
        for key, value in state_dict.items():
            if key.startswith(prefix):
                self._buffers[key.removeprefix(prefix)] = torch.empty_like(value)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def described(head: str, calls: Sequence[Call], shares: Mapping[str, float]) -> str:
    """The table that ``print(net)`` shows."""
    if not calls:
        return f"{head}\n  (run or track it to see how each call is treated)"
    rows, exact = [], []
    for name, kind in calls:
        path, _, function = name.rpartition(":")
        if kind == "exact":
            exact.append(function)
            continue
        share = shares.get(name)
        shown = "" if share is None else f"{100 * share:.1f}%"
        rows.append((path or "(model)", function, kind, shown))
    rows = [
        (path, function if count == 1 else f"{function} (x{count})", kind, shown)
        for (path, function, kind, shown), count in Counter(rows).items()
    ]
    title = ("module", "function", "how it is treated", "share of variance")
    widths = [max(len(row[i]) for row in [title, *rows]) for i in range(4)]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [title, *rows]
    ]
    counts = ", ".join(f"{exact.count(each)} {each}" for each in dict.fromkeys(exact))
    return "\n".join([head, *lines, f"  exact: {counts or 'nothing'}"])
