"""True energies of molecules for examples/molecules.py: wB97X/6-31G* by pyscf.

``python -m benchmarks.molecule_energies`` computes, one geometry after the other, what
results/benchmarks/molecule_energies.json does not have yet: about half an hour on one core.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

import numpy as np

from benchmarks import results

NAME, SEED = "molecule_energies", 0
ELEMENTS = {"H", "C", "N", "O"}
DISPLACEMENTS = (0.0, 0.1, 0.2, 0.3)  # standard deviation of each coordinate, in Angstrom
MOLECULES, ATOMS = 50, range(3, 13)


def molecules() -> list[str]:
    """Some molecules of ase's g2 collection: of these elements, closed shells, 3 to 12 atoms."""
    from ase.build import molecule
    from ase.collections import g2

    found = []
    for name in g2.names:
        atoms = molecule(name)
        is_closed = not atoms.get_initial_magnetic_moments().any() and atoms.numbers.sum() % 2 == 0
        if is_closed and len(atoms) in ATOMS and set(atoms.get_chemical_symbols()) <= ELEMENTS:
            found.append(name)
    return [found[i] for i in np.random.default_rng(SEED).permutation(len(found))[:MOLECULES]]


def geometries() -> Iterator[tuple[str, str, float, np.ndarray]]:
    """Name, symbols, displacement and positions (atoms, 3) in Angstrom."""
    from ase.build import molecule

    for number, name in enumerate(molecules()):
        atoms = molecule(name)
        for level, size in enumerate(DISPLACEMENTS):
            moved = np.random.default_rng([SEED, number, level]).standard_normal((len(atoms), 3))
            symbols = "".join(atoms.get_chemical_symbols())
            yield name, symbols, size, np.round(atoms.positions + size * moved, 5)


def energy(symbols: str, positions: np.ndarray) -> float:
    """In Hartree."""
    from pyscf import dft, gto

    atoms = list(zip(symbols, positions.tolist(), strict=True))
    solver = dft.RKS(gto.M(atom=atoms, basis="6-31g*", verbose=0), xc="wb97x")
    value = solver.kernel()
    if not solver.converged:
        solver = solver.newton()
        value = solver.kernel()
    if not solver.converged:
        raise RuntimeError(f"The energy of {symbols} does not converge at {positions.tolist()}.")
    return float(value)


def main() -> None:
    path = results.FOLDER / f"{NAME}.json"
    rows = results.load(NAME)["geometries"] if path.exists() else []
    packages = {package: version(package) for package in ("ase", "pyscf")}
    known = {(row["molecule"], row["displacement"]) for row in rows}
    for name, symbols, size, positions in geometries():
        if (name, size) in known:
            continue
        row = {"molecule": name, "displacement": size, "symbols": symbols}
        row |= {"positions": positions.tolist(), "energy": energy(symbols, positions)}
        rows.append(row)
        print(name, size, row["energy"], flush=True)
        found = {"packages": packages, "geometries": rows}
        results.save(NAME, "python -m benchmarks.molecule_energies", SEED, found)


if __name__ == "__main__":
    main()
