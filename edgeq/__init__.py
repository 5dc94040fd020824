"""edgeq: large models as one packed low-bit file, and a runtime that runs it on your device."""

from edgeq.folders import search_path as _search_path
from edgeq.version import __version__ as __version__

# typing's own constant of this name, without the time that importing typing takes.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from edgeq.converters.from_python import convert
    from edgeq.runtime import Answer, Batch, Generation, Measurement, Model, Requantization, Sampling, Session
    from edgeq.runtime.server.background import serve

__all__ = ["Answer", "Batch", "Generation", "Measurement", "Model", "Requantization", "Sampling", "Session", "convert", "serve"]

__path__ += _search_path(__path__[0])


def __getattr__(name: str) -> object:
    """What `__all__` names, imported when it is first used: `import edgeq` alone takes no time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "convert":
        from edgeq.converters.from_python import convert

        globals()[name] = convert
        return convert
    if name == "serve":
        from edgeq.runtime.server.background import serve

        globals()[name] = serve
        return serve
    from edgeq import runtime

    globals()[name] = found = getattr(runtime, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
