"""Packages that Megatron-Core and Bridge use where they are installed, and that may be broken.

Megatron asks for each by `try: import ... except ImportError`. A package that is installed and broken raises other
things: RuntimeError of Transformer Engine's empty meta package, OSError of a library that is missing, whatever its own
code raises with another CUDA. So each is imported once before Megatron is, and where that fails the package is left
out: `import` raises ImportError from then on, and `find_spec` finds nothing. Megatron imports the same ones at its own
start, so that nothing takes longer. What a module inside of a package raises later is turned into ImportError, too.

The rejected alternative, to look at versions and files without an import, cannot see a symbol or a library that is
missing. The limit: a package that ends the process at import ends it here as well.
"""

import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec

TRANSFORMER_ENGINE, *_OF_TRANSFORMER_ENGINE = TRANSFORMER_ENGINE_PACKAGES = (
    "transformer_engine",
    "transformer_engine_torch",
)
OPTIONAL = (
    *("amp_C", "apex", "causal_conv1d", "deep_ep", "emerging_optimizers", "fast_hadamard_transform", "fla"),
    *("flash_attn", "flash_attn_3", "flash_attn_interface", "flash_mla", "flashattn_hopper", "flashinfer"),
    *("fused_weight_gradient_mlp_cuda", "mamba_ssm", "modelopt", "nvidia_resiliency_ext", "torch_memory_saver"),
)
"""What Megatron-Core 0.19 and Bridge 0.6 import at their start where it is there, beside Transformer Engine."""
_reasons: dict[str, str] = {}
"""Why an installed package is left out, by its name."""
_said: set[str] = set()


def leave_out_broken_packages() -> None:
    """From now on, an optional package that does not import is as though it were not installed. May be called twice."""
    transformer_engine_problem()
    for package in OPTIONAL:
        if package not in sys.modules and importlib.util.find_spec(package) is not None:
            _try(package, package)


def transformer_engine_problem() -> str:
    """Why Transformer Engine cannot be imported here; empty where it can. It is left out as a whole where it cannot.

    Its torch part is tried: the outermost module, by which Megatron takes it to be there, imports without it.
    """
    if TRANSFORMER_ENGINE in _reasons:
        return _reasons[TRANSFORMER_ENGINE]
    if importlib.util.find_spec(TRANSFORMER_ENGINE) is None:
        return "it is not installed"
    _try(TRANSFORMER_ENGINE, f"{TRANSFORMER_ENGINE}.pytorch", *_OF_TRANSFORMER_ENGINE)
    return _reasons.get(TRANSFORMER_ENGINE, "")


def why_left_out(package: str) -> str:
    """What an installed package raised when it was imported; empty where nothing, or where it was not tried."""
    return _reasons.get(package, "")


def warn_of_broken_packages() -> None:
    """Warn of the packages that were left out, each once in a process."""
    news = [package for package in _reasons if package not in _said]
    _said.update(news)
    if news:
        listed = "; ".join(f"{package} ({_reasons[package]})" for package in news)
        warnings.warn(
            f"packages that are installed, but do not import, are left out as though they were not: {listed}",
            stacklevel=2,
        )


def _try(package: str, module: str, *with_it: str) -> None:
    """Import a module, and leave its package out where that fails, with others that belong to it."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    try:
        importlib.import_module(module)
    except ImportError as error:
        _reasons[package] = told(error.__cause__ if isinstance(error, _BrokenModuleError) else error)
        for name in [name for name in sys.modules if name.partition(".")[0] in (package, *with_it)]:
            del sys.modules[name]
        sys.modules |= dict.fromkeys([package, *with_it])  # type: ignore[arg-type]


def told(error: BaseException | None) -> str:
    """The type of an error, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class _BrokenModuleError(ImportError):
    """In place of what a module raised."""


class _Finder:
    """Finds the modules of optional packages as the other finders do, with a loader that raises ImportError alone."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in (*TRANSFORMER_ENGINE_PACKAGES, *OPTIONAL):
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _execute(exec_module: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
    try:
        exec_module(module)
    except ImportError:
        raise
    except (Exception, SystemExit) as error:
        raise _BrokenModuleError(f"{module.__name__} does not import: {told(error)}", name=module.__name__) from error
