"""What a verification says in words: where linear response is poor, and why."""

from __future__ import annotations

from covary.runs.results import PoorReasons, Verification, VerifiedLayer, WithBar

# A layer that makes so much of its error itself does not owe it to those before it.
_MOSTLY = 0.7


def sentences(result: Verification) -> list[str]:
    """One for each layer whose covariances are poor, and one on networks in time."""
    found = [_poor(layer) for layer in result.layers if layer.poor]
    unclear = [layer.name for layer in result.layers if _is_unclear(layer, result.limit)]
    if unclear:
        found.append(
            f"Of {', '.join(unclear)} it cannot be told whether covariances are more than "
            f"{result.limit:.0%} off: the simulation is too short. Take more --copies."
        )
    if not found:
        found = [
            f"No layer's covariances are more than {result.limit:.0%} off beyond doubt: linear "
            "response describes this network on these inputs."
        ]
    return [*found, _in_time(result)]


def _is_unclear(layer: VerifiedLayer, limit: float) -> bool:
    return not layer.poor and layer.steady.covariance.may_reach(limit)


def _poor(layer: VerifiedLayer) -> str:
    errors, why = layer.steady, layer.reasons
    off = f"{percent(errors.covariance.value)} off"
    text = f"{layer.name}: covariances are {off} ({percent(errors.off_diagonal.value)} "
    text += "between different units). "
    own, whole = why.own, errors.covariance.value
    if whole is not None and own < _MOSTLY * whole:
        text += (
            f"Of its own the layer would add {percent(own)}: it inherits the rest from the layers "
            "before it."
        )
        if layer.activation == "identity":
            return text
    correlated, saturated = _correlated(why), _saturated(why)
    if why.error_at_saturated > max(why.error_at_strong_pairs, 0.5):
        return " ".join([text.rstrip(), saturated, correlated]).rstrip()
    shown = [correlated, saturated] if why.error_at_saturated > 0.5 else [correlated]
    return " ".join([text.rstrip(), *shown]).rstrip()


def _correlated(why: PoorReasons) -> str:
    if not why.pairs:
        return ""
    i, j, rho = why.pairs[0]
    return (
        f"Its inputs are correlated by up to |rho| = {abs(rho):.2f} (units {i} and {j}), and "
        f"linear response keeps the first power of rho alone: the {percent(why.strong_pairs)} "
        f"of pairs with |rho| above 0.5 have {percent(why.error_at_strong_pairs)} of the "
        "squared error."
    )


def _saturated(why: PoorReasons) -> str:
    return (
        f"{percent(why.saturated)} of its units are saturated (less than a fifth of their "
        f"variance is linear in their noise); pairs with such a unit have "
        f"{percent(why.error_at_saturated)} of the squared error."
    )


def _in_time(result: Verification) -> str:
    output = result.output.simulations
    at_once, equal = (output[name].variance_share for name in ("ou-0", "ou-1"))
    return (
        "In time, with the equal time constants of the paper's equation, each layer averages over "
        f"the noise of those before it: the output has {_share(equal)} of its variance. Moments "
        f"are those of layers that follow at once, where it has {_share(at_once)} of it."
    )


def _share(share: WithBar) -> str:
    if share.value is None or share.bar is None:
        return "an unknown part"
    return f"{share.value:.2f} \N{PLUS-MINUS SIGN} {share.bar:.2f}"


def percent(value: float | None) -> str:
    """A part as people read it.

    Examples:
        >>> percent(0.123), percent(0.0123), percent(0.00001), percent(0.0)
        ('12%', '1.2%', '<0.1%', '0%')
    """
    if value is None:
        return "undefined"
    if 0 < value < 0.001:
        return "<0.1%"
    return f"{100 * value:.{1 if 0 < value < 0.0995 else 0}f}%"
