"""Export: a network as a file that other programs load without covary, ``.onnx`` or ``.pt2``."""

from __future__ import annotations

import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from covary.convert import Converted
from covary.files import replacing
from covary.moments import Moments
from covary.runs.directory import versions, weights_digest
from covary.serving.graphs import graph_of

# The version of ONNX's operators that files are written in.
OPSET = 18
FORMATS = (".onnx", ".pt2")
OUTPUTS = ("covariance", "std")
# In a .pt2 file, the metadata are this file.
EXTRA_FILE = "covary.json"
# What a file may be off by from the network itself, relative to the largest number of an output.
_TOLERANCE = 1e-4
_LATENCY_SECONDS = 0.2
Function = Callable[..., Mapping[str, Tensor]]


class ExportError(ValueError):
    """A network that cannot be exported, or not to this file. The message says why."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: the file.
        inputs: the shape of each input by its name; the batch is -1.
        outputs: the same of outputs.
        metadata: what stands beside the network in the file, texts by name.
        difference: the most by which an output differs from the network's own on the examples,
            relative to the largest number of that output; in onnxruntime too, if it is installed.
        latency: milliseconds by batch size, of the network and of the file; empty if not asked for.
    """

    path: Path
    inputs: dict[str, tuple[int, ...]]
    outputs: dict[str, tuple[int, ...]]
    metadata: dict[str, str]
    difference: float
    latency: dict[int, tuple[float, float]]


def export(
    net: nn.Module,
    path: Path | str,
    *inputs: Tensor,
    outputs: str = "covariance",
    overwrite: bool = False,
    latency: Sequence[int] = (),
) -> Exported:
    """Write a network to a file for onnxruntime (``.onnx``) or ``torch.export.load`` (``.pt2``).

    The file takes batches of any size and gives tensors: ``mean`` (B, *event) and ``covariance``
    (B, n, n), or ``std`` (B, *event); of models with several outputs, ``mean_2`` and so on. It is
    compared with the network on the examples before it is written.

    Args:
        net: any network of ``covary.nn`` layers, or what ``covary.convert`` gives, tracked; in
            evaluation mode.
        path: ends in ``.onnx`` or ``.pt2``.
        inputs: examples of what it takes, tensors with a batch; all sizes but the batch's are
            those of the file.
        outputs: ``"covariance"`` or ``"std"``, what stands beside the mean.
        overwrite: replace a file that is there.
        latency: batch sizes at which to measure how long network and file take.

    Examples:
        >>> import covary, torch
        >>> net = covary.mlp([4, 8, 3], noise=0.2).eval()
        >>> covary.export(net, "net.pt2", torch.rand(5, 4)).outputs  # doctest: +SKIP
        {'mean': (-1, 3), 'covariance': (-1, 3, 3)}
    """
    check_path(Path(path), overwrite=overwrite)
    if outputs not in OUTPUTS:
        raise ExportError(f"Outputs are one of {', '.join(OUTPUTS)}, got {outputs!r}.")
    _check_network(net, inputs)
    names = ["x", *(f"x_{i}" for i in range(2, len(inputs) + 1))]
    axis = net.batch_dim if isinstance(net, Converted) else 0
    about = {"model_digest": weights_digest(net), "network": type(net).__name__}
    return write(
        partial(named_moments, net, outputs=outputs),
        Path(path), dict(zip(names, inputs, strict=True)),
        about=about, batch_dim=axis, latency=latency,
    )  # fmt: skip


def named_moments(net: nn.Module, *inputs: Any, outputs: str = "covariance") -> dict[str, Tensor]:
    """What a network gives, as tensors by name."""
    given = pytree.tree_leaves(net(*inputs), is_leaf=lambda each: isinstance(each, Moments))
    found: dict[str, Tensor] = {}
    for i, value in enumerate(given):
        end = f"_{i + 1}" if i else ""
        if isinstance(value, Moments):
            found[f"mean{end}"] = value.mean
            second = value.covariance_matrix if outputs == "covariance" else value.stddev
            found[f"{outputs}{end}"] = second
        elif isinstance(value, Tensor):
            found[f"output{end}"] = value
    return found


def check_path(path: Path, *, overwrite: bool, formats: Sequence[str] = FORMATS) -> None:
    """Refuse, before any work, a file that cannot be written."""
    if path.suffix.lower() not in formats:
        ends = f"{', '.join(formats[:-1])} or {formats[-1]}"
        raise ExportError(f"The name of the file says what it is, and ends in {ends}; got {path}.")
    if path.is_dir():
        raise ExportError(f"{path} is a folder, where the network is a file: name one in it.")
    if path.exists() and not overwrite:
        raise ExportError(
            f"{path} exists already. Replace it (--overwrite) or choose another name."
        )
    if path.suffix.lower() == ".onnx":
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"ONNX files need the package {error.name}, which is not installed: "
                "pip install 'covary[export]'. A .pt2 file needs torch alone."
            ) from error


def write(
    function: Function,
    path: Path,
    inputs: Mapping[str, Tensor],
    *,
    about: Mapping[str, Any],
    batch_dim: int = 0,
    latency: Sequence[int] = (),
) -> Exported:
    """Write a function of tensors to a file, if the file gives the same as the function.

    Args:
        function: tensors in, tensors by name out, in the order of the file.
        path: ends in ``.onnx`` or ``.pt2``.
        inputs: examples by the names that inputs have in the file.
        about: metadata; what is not a text is written as JSON.
        batch_dim: which dimension of the inputs is the batch.
        latency: batch sizes at which to measure how long function and file take.
    """
    axes = [batch_dim if value.dim() > batch_dim else 0 for value in inputs.values()]
    examples = _resized(list(inputs.values()), axes, _batch_for(inputs.values()))
    with torch.inference_mode(False), torch.no_grad():
        expected = {name: value.clone() for name, value in function(*examples).items()}
        program = _program(function, examples, axes)
    metadata = _metadata(about, inputs, expected, axes)
    is_onnx = path.suffix.lower() == ".onnx"
    metadata |= {"opset": str(OPSET)} if is_onnx else {}
    runs: list[Function] = [program.module()]
    content = b""
    if is_onnx:
        try:
            content = _as_onnx(program, inputs, expected, metadata)
            runs += _in_onnxruntime(content)
        except Exception as error:
            raise _no_place(program, error) from error
    difference = max(_difference(function, run, examples, axes) for run in runs)
    if not difference <= _TOLERANCE:
        raise ExportError(
            f"The exported graph differs from the network by {difference:.1e} of its largest "
            "output, so nothing was written: the model does something that depends on the size of "
            "the batch or on values (an if), which a graph cannot. Take that out of its forward."
        )
    with replacing(path) as file:
        if not is_onnx:
            extra = {EXTRA_FILE: json.dumps(metadata, indent=1)}
            with _without_notices():
                torch.export.save(program, file, extra_files=extra)
        else:
            file.write(content)
    sizes = {size: _resized(examples, axes, size) for size in latency}
    times = {
        size: (_milliseconds(function, some), _milliseconds(runs[-1], some))
        for size, some in sizes.items()
    }
    shapes = (_shapes(inputs, axes), _shapes(expected, [0] * len(expected)))
    return Exported(path, *shapes, metadata, difference, times)


def _check_network(net: nn.Module, inputs: Sequence[Tensor]) -> None:
    if not isinstance(net, nn.Module) or hasattr(net, "_orig_mod"):
        raise ExportError(
            f"export takes a network as it is before torch.compile, got {type(net).__name__}."
        )
    if net.training:
        raise ExportError("A network is exported in evaluation mode: net.eval() first.")
    if not inputs or not all(isinstance(x, Tensor) and x.dim() and len(x) for x in inputs):
        raise ExportError(
            "export needs an example of each input, a tensor with a batch: "
            "covary.export(net, 'net.onnx', x)."
        )
    for module in net.modules():
        if isinstance(module, Converted) and not (module.sites.is_tracked or module.plan.is_none):
            raise ExportError(
                "This converted network was never tracked, and a file cannot measure variances by "
                "draws. Track it on some training inputs first: covary.track(net, inputs)."
            )


def _batch_for(inputs: Iterable[Tensor]) -> int:
    """A size of the batch that no other dimension has: equal ones would be taken for one."""
    others = {size for value in inputs for size in value.shape}
    return next(size for size in (23, 29, 31, 37, 41, 43, 47, 53, 59, 61) if size not in others)


def _resized(inputs: Sequence[Tensor], axes: Sequence[int], batch: int) -> list[Tensor]:
    """So many samples, the examples again and again."""
    return [
        value.index_select(axis, torch.arange(batch, device=value.device) % value.shape[axis])
        for value, axis in zip(inputs, axes, strict=True)
    ]


def _program(
    function: Function, examples: Sequence[Tensor], axes: Sequence[int]
) -> torch.export.ExportedProgram:
    """A function as a program of torch's operations, for batches of any size."""
    batch = torch.export.Dim("batch")
    try:
        graph, shapes = graph_of(function, examples, axes), tuple({axis: batch} for axis in axes)
        return torch.export.export(graph, tuple(examples), dynamic_shapes=shapes, strict=False)
    except MemoryError:
        raise
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise ExportError(
            f"This network cannot be made into a graph: {said} Models whose forward looks at "
            "values or at the size of the batch (an if, a loop, .item()) have none; let that part "
            "stay outside, and export the rest."
        ) from error


def _as_onnx(
    program: torch.export.ExportedProgram,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    metadata: Mapping[str, str],
) -> bytes:
    with _without_notices():
        found = torch.onnx.export(
            program, (), dynamo=True, opset_version=OPSET, verbose=False,
            input_names=list(inputs), output_names=list(outputs),
        )  # fmt: skip
    assert found is not None
    for node in found.model.graph:  # torch calls the result of a mean "mean"
        for value in node.outputs:
            if value.name in outputs and not value.is_graph_output():
                value.name = f"{value.name}_within"
    for value in (*found.model.graph.inputs, *found.model.graph.outputs):
        assert value.shape is not None
        for axis, size in enumerate(value.shape):
            if not isinstance(size, int):
                value.shape[axis] = "batch"
    found.model.metadata_props.update(metadata)
    content: bytes = found.model_proto.SerializeToString()
    return content


def _no_place(program: torch.export.ExportedProgram, error: Exception) -> ExportError:
    """What to say of a network that ONNX, or onnxruntime, has not all operations of."""
    numbers = [value.dtype for value in program.state_dict.values() if value.is_floating_point()]
    remedy = " or in single precision, net.float()" if {*numbers} == {torch.float64} else ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "No ONNX function" in line or "No decompositions" in line]
    said = (told or lines or [type(error).__name__])[-1][:300]
    return ExportError(
        f"ONNX (opset {OPSET}) or onnxruntime has no place for all of this network: {said} "
        f"Export it as a .pt2 file{remedy}."
    )


@contextmanager
def _without_notices() -> Iterator[None]:
    """Without what torch says while it writes, which is for those who work on torch."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def _in_onnxruntime(content: bytes) -> list[Function]:
    """The file, running in onnxruntime; nothing where that is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return []
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    outputs = [each.name for each in session.get_outputs()]

    def run(*given: Tensor) -> dict[str, Tensor]:
        arrays = {name: value.cpu().numpy() for name, value in zip(names, given, strict=True)}
        found = map(torch.from_numpy, session.run(None, arrays))
        return dict(zip(outputs, found, strict=True))

    return [run]


def _difference(
    function: Function,
    run: Function,
    examples: Sequence[Tensor],
    axes: Sequence[int],
) -> float:
    """The most that outputs differ, relative to the largest number of each."""
    found = [0.0]
    for size in (1, 2, examples[0].shape[axes[0]]):
        some = _resized(examples, axes, size)
        with torch.no_grad():
            every, expected = run(*some), function(*some)
        for name, wanted in expected.items():
            got = every[name]
            if got.shape != wanted.shape:
                return math.inf
            got, wanted = got.cpu(), wanted.cpu()
            gap = (got.double() - wanted.double()).abs()
            gap = torch.where(got == wanted, 0.0, gap).nan_to_num(nan=math.inf)
            least = torch.finfo(torch.float32).tiny
            found.append(float(gap.max() / wanted.double().abs().max().clamp(min=least)))
    return max(found)


def _milliseconds(function: Function, inputs: Sequence[Tensor]) -> float:
    """The median of as many calls as fit into a moment, and five at least."""
    times: list[float] = []
    with torch.inference_mode():
        function(*inputs)
        start = time.perf_counter()
        while len(times) < 5 or time.perf_counter() - start < _LATENCY_SECONDS:
            began = time.perf_counter()
            function(*inputs)
            times.append(time.perf_counter() - began)
    return 1000 * float(np.median(times))


def _shapes(values: Mapping[str, Tensor], axes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    pairs = zip(values.items(), axes, strict=True)
    return {
        name: tuple(-1 if i == axis else size for i, size in enumerate(value.shape))
        for (name, value), axis in pairs
    }


def _metadata(
    about: Mapping[str, Any],
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    axes: Sequence[int],
) -> dict[str, str]:
    """Texts by name: what the network is, and what goes in and comes out."""

    def described(values: Mapping[str, Tensor], axes: Sequence[int]) -> dict[str, Any]:
        return {
            name: {"shape": shape, "type": str(values[name].dtype).removeprefix("torch.")}
            for name, shape in _shapes(values, axes).items()
        }

    found = {
        "covary_version": versions()["covary"],
        "torch_version": torch.__version__,
        "inputs": described(inputs, axes),
        "outputs": described(outputs, [0] * len(outputs)),
        **about,
    }
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in found.items()
    }
